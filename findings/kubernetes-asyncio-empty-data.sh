#!/usr/bin/env bash
# kubernetes-asyncio 36.1.0: an empty `client-certificate-data` hides the file `client-certificate`.
#
# For client-go an empty value is absence, in each key. Tools that write a kubeconfig from a struct
# write such empty keys. This library prefers the data if the key exists, so that the client logs in
# without the certificate that the kubeconfig names, and the server answers 401 or takes it for
# system:anonymous. Without the empty key, the same kubeconfig has the certificate.
#
# Seen: "without the empty key: with a certificate" and "with the empty key: without a certificate"
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check kubernetes-asyncio==36.1.0
cd "$folder"
touch client.crt client.key
cat >probe.py <<'PYTHON'
import asyncio

from kubernetes_asyncio.client import Configuration
from kubernetes_asyncio.config import load_kube_config_from_dict


async def load(**user: str) -> str:
    configuration = Configuration()
    document = {
        "current-context": "here",
        "clusters": [{"name": "here", "cluster": {"server": "https://one.example"}}],
        "contexts": [{"name": "here", "context": {"cluster": "here", "user": "me"}}],
        "users": [{"name": "me", "user": user}],
    }
    await load_kube_config_from_dict(document, client_configuration=configuration)
    return "with a certificate" if configuration.cert_file else "without a certificate"


files = {"client-certificate": "client.crt", "client-key": "client.key"}
empty = {"client-certificate-data": "", "client-key-data": ""}
print("without the empty key:", asyncio.run(load(**files)))
print("with the empty key:", asyncio.run(load(**files, **empty)))
PYTHON
seen=$(venv/bin/python probe.py)
echo "$seen"
expected='without the empty key: with a certificate
with the empty key: without a certificate'
[ "$seen" = "$expected" ]
