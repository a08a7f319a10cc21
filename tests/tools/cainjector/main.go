// Command cainjector runs cert-manager's own cainjector for webhooks. It writes the CA from a
// Certificate's Secret into `caBundle`, in the cluster of $KUBECONFIG.
package main

import (
	"log"

	certmanager "github.com/cert-manager/cert-manager/pkg/apis/certmanager/v1"
	"github.com/cert-manager/cert-manager/pkg/controller/cainjector"
	"k8s.io/client-go/kubernetes/scheme"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/log/zap"
	"sigs.k8s.io/controller-runtime/pkg/metrics/server"
)

func main() {
	ctrl.SetLogger(zap.New())
	ctx := ctrl.SetupSignalHandler()
	if err := certmanager.AddToScheme(scheme.Scheme); err != nil {
		log.Fatal(err)
	}
	config := ctrl.GetConfigOrDie()
	config.UserAgent = "cainjector" // its field manager
	manager, err := ctrl.NewManager(config, ctrl.Options{
		Scheme:  scheme.Scheme,
		Metrics: server.Options{BindAddress: "0"},
	})
	if err != nil {
		log.Fatal(err)
	}
	options := cainjector.SetupOptions{
		EnableCertificatesDataSource: true,
		EnabledReconcilersFor:        map[string]bool{cainjector.MutatingWebhookConfigurationName: true},
	}
	if err := cainjector.RegisterAllInjectors(ctx, manager, options); err != nil {
		log.Fatal(err)
	}
	if err := manager.Start(ctx); err != nil {
		log.Fatal(err)
	}
}
