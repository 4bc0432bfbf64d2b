// The status that kstatus computes, as Flux and Helm do. Each line of standard input is an object in JSON; each line of
// standard output is what Flux's copy of the library and the original say of it.
package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log"
	"os"
	"runtime/debug"

	flux "github.com/fluxcd/cli-utils/pkg/kstatus/status"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	original "sigs.k8s.io/cli-utils/pkg/kstatus/status"
)

const module = "github.com/fluxcd/cli-utils"

type answer struct {
	Flux     string `json:"flux"`
	Original string `json:"original"`
	Message  string `json:"message"`
}

func main() {
	if len(os.Args) > 1 {
		printVersion()
		return
	}
	lines, answers := bufio.NewReader(os.Stdin), json.NewEncoder(os.Stdout)
	for {
		line, err := lines.ReadBytes('\n')
		if errors.Is(err, io.EOF) {
			return
		}
		check(err)
		object := &unstructured.Unstructured{}
		check(object.UnmarshalJSON(line)) // it reads integers as int64, which the library requires
		check(answers.Encode(compute(object)))
	}
}

func compute(object *unstructured.Unstructured) answer {
	found, err := flux.Compute(object)
	check(err)
	other, err := original.Compute(object)
	check(err)
	return answer{string(found.Status), string(other.Status), found.Message}
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}

func printVersion() {
	build, _ := debug.ReadBuildInfo()
	for _, dependency := range build.Deps {
		if dependency.Path == module {
			fmt.Println(dependency.Version)
		}
	}
}
