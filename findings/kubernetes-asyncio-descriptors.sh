#!/usr/bin/env bash
# kubernetes-asyncio 36.1.0: each new certificate leaves an open descriptor and a file.
#
# A kubeconfig with certificates as data, or a login plugin that returns a new one, is written to
# temporary files, because `ssl` loads only files. The descriptor that `tempfile.mkstemp` opens is
# never closed, and the file is removed when the process ends. A program that logs in each hour with
# a new certificate and key reaches the usual limit of 1,024 descriptors after three weeks.
#
# Seen: "100 logins: 200 more descriptors, 200 more files"
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check kubernetes-asyncio==36.1.0
cd "$folder"
mkdir tmp
cat >probe.py <<'PYTHON'
import asyncio
import base64
import os

from kubernetes_asyncio.client import Configuration
from kubernetes_asyncio.config import load_kube_config_from_dict


def count() -> tuple[int, int]:
    return len(os.listdir("/proc/self/fd")), len(os.listdir("tmp"))


async def load(number: int) -> None:
    pair = {
        f"client-{key}-data": base64.b64encode(f"{key} {number}".encode()).decode()
        for key in ("certificate", "key")
    }
    document = {
        "current-context": "here",
        "clusters": [{"name": "here", "cluster": {"server": "https://one.example"}}],
        "contexts": [{"name": "here", "context": {"cluster": "here", "user": "me"}}],
        "users": [{"name": "me", "user": pair}],
    }
    await load_kube_config_from_dict(
        document, client_configuration=Configuration(), temp_file_path="tmp"
    )


async def main() -> None:
    await load(0)
    before = count()
    for number in range(1, 101):
        await load(number)
    descriptors, files = (now - then for now, then in zip(count(), before))
    print(f"100 logins: {descriptors} more descriptors, {files} more files")


asyncio.run(main())
PYTHON
seen=$(venv/bin/python probe.py)
echo "$seen"
[ "$seen" = "100 logins: 200 more descriptors, 200 more files" ]
