// Command cert-manager prints the CRDs of cert-manager of which deploy/ has objects as one JSON list.
package main

import (
	"encoding/json"
	"log"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	// Keeps the module, whose CRDs are files and no Go code, among the requirements.
	_ "github.com/cert-manager/cert-manager/pkg/apis/certmanager"

	"sigs.k8s.io/yaml"
)

const module = "github.com/cert-manager/cert-manager"

var kinds = []string{"certificates", "issuers"}

func main() {
	directory, err := exec.Command("go", "list", "-m", "-f", "{{.Dir}}", module).Output()
	if err != nil {
		log.Fatal(err)
	}
	root := strings.TrimSpace(string(directory))
	crds := make([]json.RawMessage, 0, len(kinds))
	for _, kind := range kinds {
		text, err := os.ReadFile(filepath.Join(root, "deploy", "crds", "cert-manager.io_"+kind+".yaml"))
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
