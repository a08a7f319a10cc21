// Command pause waits for a signal to end. It holds a pod's namespaces, and stands in for
// containers that only have to exist.
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
