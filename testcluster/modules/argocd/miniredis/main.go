// A Redis in memory for Argo CD: miniredis ADDRESS.
package main

import (
	"fmt"
	"log"
	"os"
	"runtime/debug"

	"github.com/alicebob/miniredis/v2"
)

const module = "github.com/alicebob/miniredis/v2"

func main() {
	if len(os.Args) != 2 || os.Args[1] == "--version" {
		printVersion()
		return
	}
	if err := miniredis.NewMiniRedis().StartAddr(os.Args[1]); err != nil {
		log.Fatal(err)
	}
	select {}
}

func printVersion() {
	build, _ := debug.ReadBuildInfo()
	for _, dependency := range build.Deps {
		if dependency.Path == module {
			fmt.Println(dependency.Version)
		}
	}
}
