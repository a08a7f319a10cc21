"""The command `check`: whether a configuration is valid, and which policy it gives to a VM."""

import asyncio
from pathlib import Path

from exporter.errors import Exit
from exporter.settings import Settings, load_settings
from exporter.settings.policy import write_policy
from exporter.text import escape, format_duration


def check(path: Path, vmi: tuple[str, str] | None = None, kubeconfig: Path | None = None) -> Exit:
    """`check`: print that a configuration file is valid. Raises `InvalidSettings` if it is not.

    `vmi` is the namespace and name of a VMI. If it is given, print the VMI's policy too, and its
    entry of `policy.overrides`. The cluster is asked only if labels or a priority class decide.
    Then this raises `NoCredentials`, `CannotAsk` or `NoSuchVmi` if the VMI cannot be read.
    """
    settings = load_settings(path)
    for remark in settings.remarks:
        print(f"{path}: {remark}")
    print(f"{path}: valid")
    if vmi is None:
        return Exit.OK
    namespace, name = vmi
    chosen = settings.policy.find_override_of_namespace(namespace)
    if chosen is None:
        from exporter.cli.client import NoSuchVmi
        from exporter.credentials import CannotAsk
        from exporter.kube.client import ApiError
        from exporter.kube.kubeconfig import NoCredentials
        from exporter.kube.objects.kubevirt import InvalidObject
        from exporter.logs import configure_logging

        # A login plugin may ask a person to log in.
        configure_logging(form=settings.log.format, level=settings.log.level)
        cannot = (
            f"{namespace}/{name}: its labels or priority class decide which entry applies, but the"
            " VMI cannot be read"
        )
        try:
            chosen = asyncio.run(_ask_cluster(settings, namespace, name, kubeconfig))
        except NoCredentials as trouble:
            raise NoCredentials(f"{cannot}: {trouble}") from None
        except (ApiError, InvalidObject) as trouble:
            raise CannotAsk(f"{cannot}: {trouble}") from None
        if chosen is None:
            raise NoSuchVmi(f"{cannot}: there is no such VMI")
    entry = next(
        (override for override in settings.policy.overrides if override.name == chosen), None
    )
    which = "no entry" if entry is None else f"the entry {entry.name}"
    policy = settings.policy if entry is None else entry.policy
    values = write_policy(policy) | {"block": policy.block}
    del values["guards"]
    text = ", ".join(
        f"{key} {str(at).lower() if isinstance(at, bool) else format_duration(at)}"
        for key, at in values.items()
    )
    print(escape(f"{namespace}/{name}: {which} of policy.overrides: {text}"))
    return Exit.OK


async def _ask_cluster(
    settings: Settings, namespace: str, name: str, kubeconfig: Path | None
) -> str | None:
    """The name of the VMI's override, "" if it has none; None if there is no such VMI.

    It uses `list`, because the exporter's role does not allow `get`. Raises `ApiError`,
    `NoCredentials` or `InvalidObject`.
    """
    from exporter.engine.facts.model import Resource
    from exporter.kube.client import ApiServer
    from exporter.kube.login import Login
    from exporter.kube.objects.kubevirt import parse_object, parse_page

    login = Login(kubeconfig=kubeconfig)
    timeout, names = settings.kube.read_timeout, settings.kubevirt
    async with ApiServer(login, read_timeout=timeout, names=names) as api:
        body = await api.list_page(Resource.VMIS, namespace, limit=1, token="", name=name)
    for item in parse_page(body).items:
        traits = parse_object(Resource.VMIS, item).traits
        if traits is not None:
            return settings.policy.choose(namespace, traits.read_labels(), traits.priority_class)
    return None
