"""The recorded answers to the table of logins are those of the real kubectl and of client-go."""

import asyncio
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.cluster.binaries import find_binary
from tests.support.logins import ANSWERS, ask_kubectl, ask_peer, read_rows


AT_A_TIME = 4


async def test_the_recorded_answers_are_theirs(
    certificates: Path, tmp_path: Path, prove: Callable[[str], None]
) -> None:
    """The real kubectl is asked where all addresses exist. RECORD=1 writes the answers."""
    peer, kubectl = find_binary("login-peer"), find_binary("kubectl")
    limit = asyncio.Semaphore(AT_A_TIME)
    rows = read_rows()

    async def ask(number: int) -> dict[str, Any]:
        row = rows[number]
        async with limit:
            outcome = await asyncio.to_thread(
                ask_peer, peer, row, tmp_path / f"{number}-peer", certificates
            )
            answers = {"client-go": outcome.write()}
            if outcome.refused or outcome.seen.get("dialled") == "127.0.0.1:$PORT":
                asked = await asyncio.to_thread(
                    ask_kubectl, kubectl, row, tmp_path / f"{number}-kubectl", certificates
                )
                answers["kubectl"] = asked.write()
        return answers

    codes = await asyncio.gather(*(ask(number) for number in range(len(rows))))
    answers = {row.name: answer for row, answer in zip(rows, codes, strict=True)}
    if os.environ.get("RECORD"):
        ANSWERS.write_text(json.dumps(answers, indent=1) + "\n")
    assert answers == json.loads(ANSWERS.read_text())
    asked = sum("kubectl" in answer for answer in answers.values())
    prove(f"logins: {len(rows)} rows with client-go, {asked} of them also with kubectl")
