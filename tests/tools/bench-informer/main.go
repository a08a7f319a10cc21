// Program bench-informer caches the same objects as the reference plugin, in the same way. It uses
// client-go's dynamic informers, one per resource, which cache whole objects. First it prints how
// long the informers took to sync. Then, for each line that it reads from standard input, it prints
// how many objects have been added, and how many updates there were.
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"runtime"
	"strings"
	"sync/atomic"
	"time"

	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/dynamic/dynamicinformer"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
)

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "bench-informer:", err)
		os.Exit(1)
	}
}

func run() error {
	server := flag.String("url", "", "the API server")
	resources := flag.String("resources", "virtualmachineinstances", "resources of kubevirt.io/v1, separated by commas")
	flag.Parse()
	client, err := dynamic.NewForConfig(&rest.Config{Host: *server, QPS: -1})
	if err != nil {
		return err
	}
	var added, updated atomic.Int64
	handler := cache.ResourceEventHandlerFuncs{
		AddFunc:    func(any) { added.Add(1) },
		UpdateFunc: func(any, any) { updated.Add(1) },
	}
	factory := dynamicinformer.NewDynamicSharedInformerFactory(client, 0)
	var synced []cache.InformerSynced
	for _, resource := range strings.Split(*resources, ",") {
		informer := factory.ForResource(schema.GroupVersionResource{Group: "kubevirt.io", Version: "v1", Resource: resource}).Informer()
		registration, err := informer.AddEventHandler(handler)
		if err != nil {
			return err
		}
		synced = append(synced, registration.HasSynced)
	}
	began := time.Now()
	factory.Start(context.Background().Done())
	for _, has := range synced {
		for !has() {
			time.Sleep(time.Millisecond)
		}
	}
	report := func(heap bool) error {
		fact := map[string]any{"added": added.Load(), "updated": updated.Load()}
		if heap {
			runtime.GC()
			var memory runtime.MemStats
			runtime.ReadMemStats(&memory)
			fact["heap"] = memory.HeapAlloc
		}
		return json.NewEncoder(os.Stdout).Encode(fact)
	}
	if err := json.NewEncoder(os.Stdout).Encode(map[string]any{"seconds": time.Since(began).Seconds()}); err != nil {
		return err
	}
	lines := bufio.NewScanner(os.Stdin)
	for lines.Scan() {
		if err := report(lines.Text() == "heap"); err != nil {
			return err
		}
	}
	return lines.Err()
}
