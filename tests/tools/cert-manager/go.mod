module tools/cert-manager

go 1.26.0

require (
	github.com/cert-manager/cert-manager v1.21.2
	sigs.k8s.io/yaml v1.6.0
)

require go.yaml.in/yaml/v2 v2.4.4 // indirect
