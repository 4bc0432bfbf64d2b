// The status that kstatus computes, as Flux and Helm do: kstatus OBJECT...
//
// It prints one line of JSON for each object, with what Flux's copy of the library and the original say.
package main

import (
	"encoding/json"
	"fmt"
	"log"
	"os"
	"runtime/debug"

	flux "github.com/fluxcd/cli-utils/pkg/kstatus/status"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	original "sigs.k8s.io/cli-utils/pkg/kstatus/status"
	"sigs.k8s.io/yaml"
)

const module = "github.com/fluxcd/cli-utils"

type answer struct {
	File     string `json:"file"`
	Status   string `json:"status"`
	Message  string `json:"message"`
	Original string `json:"original"`
}

func main() {
	if len(os.Args) < 2 || os.Args[1] == "--version" {
		printVersion()
		return
	}
	for _, file := range os.Args[1:] {
		if err := json.NewEncoder(os.Stdout).Encode(compute(file)); err != nil {
			log.Fatal(err)
		}
	}
}

func compute(file string) answer {
	text, err := os.ReadFile(file)
	check(file, err)
	object := &unstructured.Unstructured{}
	check(file, yaml.Unmarshal(text, &object.Object))
	found, err := flux.Compute(object)
	check(file, err)
	other, err := original.Compute(object)
	check(file, err)
	return answer{file, string(found.Status), found.Message, string(other.Status)}
}

func check(file string, err error) {
	if err != nil {
		log.Fatalf("%s: %v", file, err)
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
