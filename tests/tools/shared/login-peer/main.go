// Command login-peer logs in as a program with client-go does, and sends one request.
//
// It reads --kubeconfig, or else what the environment names, and gets /probe. Each connection goes to
// $CAPTURE instead, and its address is printed. The exit code is 1 if the request was not answered.
package main

import (
	"context"
	"flag"
	"fmt"
	"net"
	"os"
	"time"

	_ "k8s.io/client-go/plugin/pkg/client/auth"

	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
)

func main() {
	rules := clientcmd.NewDefaultClientConfigLoadingRules()
	flag.StringVar(&rules.ExplicitPath, "kubeconfig", "", "a kubeconfig")
	flag.Parse()
	if err := probe(rules); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func probe(rules *clientcmd.ClientConfigLoadingRules) error {
	config, err := clientcmd.NewNonInteractiveDeferredLoadingClientConfig(rules, nil).ClientConfig()
	if err != nil {
		return err
	}
	config.Timeout = 10 * time.Second
	config.NegotiatedSerializer = scheme.Codecs.WithoutConversion()
	config.Dial = func(ctx context.Context, network, address string) (net.Conn, error) {
		fmt.Println(address)
		return (&net.Dialer{}).DialContext(ctx, network, os.Getenv("CAPTURE"))
	}
	client, err := rest.UnversionedRESTClientFor(config)
	if err != nil {
		return err
	}
	_, err = client.Get().AbsPath("/probe").MaxRetries(0).DoRaw(context.Background())
	return err
}
