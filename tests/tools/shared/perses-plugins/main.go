// Command perses-plugins prints the schemas of the Perses plugins that our dashboards use. The
// output is one JSON object with the text of each file, by path. The files are the plugin folder of
// a Perses server, without the plugins' web UI.
package main

import (
	"encoding/json"
	"fmt"
	"io/fs"
	"log"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"strings"
)

var (
	plugins = []string{"prometheus", "statchart", "table", "timeserieschart"}
	// The modules that the schemas of the plugins import.
	shared = []string{"github.com/perses/perses", "github.com/perses/shared", "github.com/perses/spec"}
)

func main() {
	files := map[string]string{}
	for _, plugin := range plugins {
		name := "github.com/perses/plugins/" + plugin
		root, version := find(name)
		read(files, plugin+"/schemas", filepath.Join(root, "schemas"))
		text, err := os.ReadFile(filepath.Join(root, "package.json"))
		if err != nil {
			log.Fatal(err)
		}
		files[plugin+"/package.json"] = string(text)
		// Upstream, the build of a plugin's pages writes this file.
		files[plugin+"/mf-manifest.json"] = fmt.Sprintf(
			`{"id": %q, "name": %q, "metaData": {"buildInfo": {"buildVersion": %q, "buildName": %q}}}`,
			plugin, plugin, strings.TrimPrefix(version, "v"), plugin)
		files[plugin+"/cue.mod/module.cue"] = fmt.Sprintf("module: %q\nlanguage: version: \"v0.15.1\"\n", name+"@v0")
		for _, module := range shared {
			root, _ := find(module)
			read(files, plugin+"/cue.mod/pkg/"+module+"/cue", filepath.Join(root, "cue"))
		}
	}
	if err := json.NewEncoder(os.Stdout).Encode(files); err != nil {
		log.Fatal(err)
	}
}

// find downloads a module, and returns its folder and its version.
func find(name string) (string, string) {
	out, err := exec.Command("go", "mod", "download", "-json", name).Output()
	if err != nil {
		log.Fatalf("go mod download %s: %v\n%s", name, err, out)
	}
	var module struct{ Dir, Version string }
	if err := json.Unmarshal(out, &module); err != nil {
		log.Fatal(err)
	}
	return module.Dir, module.Version
}

// read adds the CUE files below a folder to `files`, but not those in `migrate` and `cue.mod`.
func read(files map[string]string, prefix, root string) {
	err := fs.WalkDir(os.DirFS(root), ".", func(name string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if entry.IsDir() && (entry.Name() == "migrate" || entry.Name() == "cue.mod") {
			return fs.SkipDir
		}
		if path.Ext(name) != ".cue" {
			return nil
		}
		text, err := os.ReadFile(filepath.Join(root, filepath.FromSlash(name)))
		files[prefix+"/"+name] = string(text)
		return err
	})
	if err != nil {
		log.Fatal(err)
	}
}
