// The standard descheduler with the plugin KubeVirtVerdicts.
package main

import (
	"os"

	"github.com/spf13/cobra"
	"k8s.io/component-base/cli"
	"sigs.k8s.io/descheduler/cmd/descheduler/app"
	"sigs.k8s.io/descheduler/pkg/framework/pluginregistry"

	"github.com/kubevirt-eviction-exporter/exporter/deploy/descheduler/verdicts"
)

func main() {
	command := app.NewDeschedulerCommand(os.Stdout)
	command.AddCommand(app.NewVersionCommand())
	setUp := command.PreRunE
	// The PreRunE of the standard command empties the registry, so the plugin is added afterwards.
	command.PreRunE = func(cmd *cobra.Command, args []string) error {
		if err := setUp(cmd, args); err != nil {
			return err
		}
		verdicts.Register(pluginregistry.PluginRegistry)
		return nil
	}
	os.Exit(cli.Run(command))
}
