// Command monitoring prints the Prometheus operator's own CRDs as one JSON list.
package main

import (
	"encoding/json"
	"log"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	// Keeps the module, whose CRDs are files and no Go code, among the requirements.
	_ "github.com/prometheus-operator/prometheus-operator/pkg/versionutil"

	"sigs.k8s.io/yaml"
)

const module = "github.com/prometheus-operator/prometheus-operator"

// Those of which deploy/ has objects.
var kinds = []string{"podmonitors", "prometheusrules"}

func main() {
	directory, err := exec.Command("go", "list", "-m", "-f", "{{.Dir}}", module).Output()
	if err != nil {
		log.Fatal(err)
	}
	root := strings.TrimSpace(string(directory))
	crds := make([]json.RawMessage, 0, len(kinds))
	for _, kind := range kinds {
		name := "monitoring.coreos.com_" + kind + ".yaml"
		text, err := os.ReadFile(filepath.Join(root, "example", "prometheus-operator-crd", name))
		if err != nil {
			log.Fatal(err)
		}
		crd, err := yaml.YAMLToJSON(text)
		if err != nil {
			log.Fatal(err)
		}
		crds = append(crds, crd)
	}
	if err := json.NewEncoder(os.Stdout).Encode(crds); err != nil {
		log.Fatal(err)
	}
}
