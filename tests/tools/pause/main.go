// Command pause waits until a signal ends it. It holds a pod's namespaces, and replaces containers
// that only have to exist.
package main

import (
	"os"
	"os/signal"
	"syscall"
)

func main() {
	ended := make(chan os.Signal, 1)
	signal.Notify(ended, syscall.SIGINT, syscall.SIGTERM)
	<-ended
}
