// Command added-crds prints, as one JSON list, the CRDs of other projects that deploy/ uses.
package main

import (
	"encoding/json"
	"log"
	"os"
	"os/exec"
	"path/filepath"

	// These imports keep the modules in go.mod. Only the modules' CRD files are used, not their Go
	// code.
	_ "github.com/cert-manager/cert-manager/pkg/apis/certmanager"
	_ "github.com/prometheus-operator/prometheus-operator/pkg/versionutil"

	"sigs.k8s.io/yaml"
)

// The CRD files of each module.
var modules = []struct {
	path, folder string
	files        []string
}{
	{
		path:   "github.com/prometheus-operator/prometheus-operator",
		folder: "example/prometheus-operator-crd",
		files:  []string{"monitoring.coreos.com_podmonitors.yaml", "monitoring.coreos.com_prometheusrules.yaml"},
	},
	{
		path:   "github.com/cert-manager/cert-manager",
		folder: "deploy/crds",
		files:  []string{"cert-manager.io_certificates.yaml", "cert-manager.io_issuers.yaml"},
	},
}

func main() {
	var crds []json.RawMessage
	for _, module := range modules {
		out, err := exec.Command("go", "mod", "download", "-json", module.path).Output()
		if err != nil {
			log.Fatalf("go mod download %s: %v\n%s", module.path, err, out)
		}
		var downloaded struct{ Dir string }
		if err := json.Unmarshal(out, &downloaded); err != nil {
			log.Fatal(err)
		}
		for _, file := range module.files {
			path := filepath.Join(downloaded.Dir, filepath.FromSlash(module.folder), file)
			text, err := os.ReadFile(path)
			if err != nil {
				log.Fatal(err)
			}
			crd, err := yaml.YAMLToJSON(text)
			if err != nil {
				log.Fatal(err)
			}
			crds = append(crds, crd)
		}
	}
	if err := json.NewEncoder(os.Stdout).Encode(crds); err != nil {
		log.Fatal(err)
	}
}
