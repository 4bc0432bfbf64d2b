// What Flux makes of objects with the healthCheckExprs of a patch of a Kustomization: health PATCH OBJECT...
//
// For each object it prints one line of JSON: the status, or the error of an expression.
package main

import (
	"context"
	"encoding/json"
	"fmt"
	"log"
	"os"
	"runtime/debug"

	"github.com/fluxcd/pkg/apis/kustomize"
	"github.com/fluxcd/pkg/runtime/cel"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/yaml"
)

const module = "github.com/fluxcd/pkg/runtime"

type answer struct {
	Status string `json:"status"`
	Error  string `json:"error"`
}

func main() {
	if len(os.Args) < 3 {
		printVersion()
		return
	}
	evaluator := evaluator(os.Args[1])
	for _, file := range os.Args[2:] {
		check(json.NewEncoder(os.Stdout).Encode(evaluate(evaluator, file)))
	}
}

func evaluator(file string) *cel.StatusEvaluator {
	var patch struct {
		Spec struct {
			HealthCheckExprs []kustomize.CustomHealthCheck `json:"healthCheckExprs"`
		} `json:"spec"`
	}
	check(yaml.UnmarshalStrict(read(file), &patch))
	found, err := cel.NewStatusEvaluator(&patch.Spec.HealthCheckExprs[0].HealthCheckExpressions)
	check(err)
	return found
}

func evaluate(evaluator *cel.StatusEvaluator, file string) answer {
	object := &unstructured.Unstructured{}
	check(object.UnmarshalJSON(read(file)))
	found, err := evaluator.Evaluate(context.Background(), object)
	if err != nil {
		return answer{Error: err.Error()}
	}
	return answer{Status: string(found.Status)}
}

func read(file string) []byte {
	content, err := os.ReadFile(file)
	check(err)
	return content
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
