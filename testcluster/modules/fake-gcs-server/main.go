// fake-gcs-server on 127.0.0.1 over HTTP, with its objects in memory: fake-gcs-server PORT BUCKET.
package main

import (
	"fmt"
	"log"
	"os"
	"runtime/debug"
	"strconv"

	"github.com/fsouza/fake-gcs-server/fakestorage"
)

const module = "github.com/fsouza/fake-gcs-server"

func main() {
	if len(os.Args) != 3 {
		printVersion()
		return
	}
	port, err := strconv.ParseUint(os.Args[1], 10, 16)
	if err != nil {
		log.Fatal(err)
	}
	address := fmt.Sprintf("127.0.0.1:%d", port)
	server, err := fakestorage.NewServerWithOptions(fakestorage.Options{
		Scheme: "http", Host: "127.0.0.1", Port: uint16(port), PublicHost: address, ExternalURL: "http://" + address,
	})
	if err != nil {
		log.Fatal(err)
	}
	server.CreateBucketWithOpts(fakestorage.CreateBucketOpts{Name: os.Args[2]})
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
