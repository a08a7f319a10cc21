#!/usr/bin/env bash
# kubernetes-asyncio 36.1.0: of several kubeconfigs, the last current-context wins.
#
# KUBECONFIG=one:two names two files. kubectl takes the current-context of the first file that has
# one (client-go, tools/clientcmd/loader.go: "the first file to set a value wins"), and so does this
# library for clusters, contexts and users of the same name. But it takes the current-context of the
# last file. So the same KUBECONFIG means another cluster for kubectl than for a program.
#
# Seen: "the context is of the file two, https://two.example"
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check kubernetes-asyncio==36.1.0
cd "$folder"
cat >one <<'YAML'
apiVersion: v1
kind: Config
current-context: first
clusters: [{name: first, cluster: {server: https://one.example}}]
contexts: [{name: first, context: {cluster: first, user: me}}]
users: [{name: me, user: {}}]
YAML
sed 's/first/second/g; s/one/two/g' one >two
cat >probe.py <<'PYTHON'
import asyncio

from kubernetes_asyncio.client import Configuration
from kubernetes_asyncio.config import load_kube_config


async def main() -> None:
    configuration = Configuration()
    await load_kube_config("one:two", client_configuration=configuration)
    place = configuration.host.removeprefix("https://").removesuffix(".example")
    print(f"the context is of the file {place}, {configuration.host}")


asyncio.run(main())
PYTHON
seen=$(venv/bin/python probe.py)
echo "$seen"
[ "$seen" = "the context is of the file two, https://two.example" ]
