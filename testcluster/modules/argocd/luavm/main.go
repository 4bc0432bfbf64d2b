// Argo CD's Lua VM with the customizations of a ConfigMap: luavm CONFIGMAP OBJECT...
//
// For each object it prints one line of JSON: the health, the actions that are offered, and each action's result. As in
// Argo CD, the result is applied as a merge patch; `patch` is that patch, and `result` the object after it.
package main

import (
	"encoding/json"
	"fmt"
	"log"
	"os"
	"runtime/debug"
	"strings"

	"github.com/argoproj/argo-cd/v3/pkg/apis/application/v1alpha1"
	"github.com/argoproj/argo-cd/v3/util/lua"
	jsonpatch "github.com/evanphx/json-patch"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/yaml"
)

const (
	module  = "github.com/argoproj/argo-cd/v3"
	actions = "resource.customizations.actions."
	health  = "resource.customizations.health."
	open    = "resource.customizations.useOpenLibs."
)

type answer struct {
	File    string                     `json:"file"`
	Health  any                        `json:"health"`
	Actions []v1alpha1.ResourceAction  `json:"actions"`
	Patches map[string]json.RawMessage `json:"patches"`
}

func main() {
	if len(os.Args) < 3 {
		printVersion()
		return
	}
	vm := lua.VM{ResourceOverrides: overrides(os.Args[1])}
	for _, file := range os.Args[2:] {
		if err := json.NewEncoder(os.Stdout).Encode(run(vm, file)); err != nil {
			log.Fatal(err)
		}
	}
}

func overrides(file string) map[string]v1alpha1.ResourceOverride {
	var configMap struct {
		Data map[string]string `json:"data"`
	}
	read(file, &configMap)
	found := map[string]v1alpha1.ResourceOverride{}
	for key, value := range configMap.Data {
		for _, prefix := range []string{actions, health, open} {
			if name, matches := strings.CutPrefix(key, prefix); matches {
				kind := strings.Replace(name, "_", "/", 1)
				override := found[kind]
				switch prefix {
				case actions:
					override.Actions = value
				case health:
					override.HealthLua = value
				case open:
					override.UseOpenLibs = value == "true"
				}
				found[kind] = override
			}
		}
	}
	return found
}

func run(vm lua.VM, file string) answer {
	object := &unstructured.Unstructured{}
	read(file, &object.Object)
	script, openLibraries, err := vm.GetHealthScript(object)
	check(file, err)
	vm.UseOpenLibs = openLibraries
	status, err := vm.ExecuteHealthLua(object, script)
	check(file, err)
	discovery, err := vm.GetResourceActionDiscovery(object)
	check(file, err)
	offered, err := vm.ExecuteResourceActionDiscovery(object, discovery)
	check(file, err)
	patches := map[string]json.RawMessage{}
	for _, action := range offered {
		patches[action.Name] = patch(vm, object, action.Name)
	}
	return answer{file, status, offered, patches}
}

func patch(vm lua.VM, object *unstructured.Unstructured, name string) json.RawMessage {
	action, err := vm.GetResourceAction(object, name)
	check(name, err)
	changed, err := vm.ExecuteResourceAction(object, action.ActionLua, nil)
	check(name, err)
	if len(changed) != 1 {
		log.Fatalf("%s: %d objects are changed, not one", name, len(changed))
	}
	before, err := json.Marshal(object)
	check(name, err)
	after, err := json.Marshal(changed[0].UnstructuredObj)
	check(name, err)
	difference, err := jsonpatch.CreateMergePatch(before, after)
	check(name, err)
	return difference
}

func read(file string, into any) {
	text, err := os.ReadFile(file)
	check(file, err)
	check(file, yaml.Unmarshal(text, into))
}

func check(what string, err error) {
	if err != nil {
		log.Fatalf("%s: %v", what, err)
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
