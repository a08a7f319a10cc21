"""The errors of the exporter: their root, the tree of all of them, and the exit codes.

Each error stands in the module that raises it. An error under `CommandFailed` ends the command with
the exit code beside it; every other error is handled by its caller.

    ExporterError
        CommandFailed
            InvalidSettings        2   settings.document
            NotSynced              3   kube.watch.informers
            KubeVirtMissing        4   kube.watch.reflector
            NoCredentials          5   kube.kubeconfig
            CannotListen           6   server.http.certificates
            HistoryUnwritable      7   history
            CannotAsk              8   credentials
                InvalidEndpoint    2   credentials
            NoSuchVmi              9   cli.client
            CannotRecord          10   whatif.recording
            CannotReplay          11   whatif.recording
            NoSuchNode            13   cli.client
            NotInImage             2   cli.commands
        ApiError                       kube.client
            Expired                    kube.client
            Denied                     kube.client
                Forbidden              kube.client
            Absent                     kube.client
            Conflict                   kube.client
            Unsupported                kube.client
            Overloaded                 kube.client
            Unreachable                kube.client
                Unconnected            kube.client
                Untrusted              kube.client
            Silent                     kube.client
        InvalidObject                  kube.objects.kubevirt
            NoEvent                    kube.objects.kubevirt
        Refusal                        server.http.problems
        NotAReview                     server.admission.reviews
"""

from enum import IntEnum
from typing import ClassVar, Self

import msgspec


MALFORMED = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""What msgspec raises for bytes that another program wrote: JSON with invalid syntax,
wrong types or text that is not UTF-8, and arrays or objects that are nested too deeply."""


class Exit(IntEnum):
    """Exit codes, each with its `meaning`."""

    def __new__(cls, code: int, meaning: str) -> Self:
        """A member: an integer with a meaning."""
        member = int.__new__(cls, code)
        member._value_ = code
        member.meaning = meaning
        return member

    meaning: str

    OK = 0, "stopped by SIGTERM or Ctrl-C, the configuration is valid, or there was an answer"
    FAILED = 1, "a fault of the exporter itself; the log ends with a traceback"
    USAGE = 2, "wrong arguments or configuration; every error is named with its path"
    NOT_SYNCED = 3, "VMIs could not be listed within kube.syncTimeout"
    KUBEVIRT_MISSING = 4, "the API server has no VMI resource, and kube.waitForKubeVirt is off"
    NO_CREDENTIALS = 5, "no service account of a pod and no usable kubeconfig"
    CANNOT_LISTEN = 6, "a listen address is in use or not allowed, or its TLS files cannot be used"
    UNUSABLE = 7, "the directory of history: file:... cannot be used"
    CANNOT_ASK = 8, "no usable answer from the exporter or the cluster, or it is not ready"
    NO_SUCH_VMI = 9, "there is no such VMI, or more than one namespace has one of this name"
    CANNOT_RECORD = 10, "the recording cannot be written, or exists already"
    CANNOT_REPLAY = 11, "no recording or an empty one, or the answer cannot be printed"
    CANNOT_BE_EMPTIED = (
        12,
        "`node NAME`: the node cannot be emptied, because a VM or its old pod stays",
    )
    NO_SUCH_NODE = 13, "no VMI is on that node: it is empty, or there is no such node"
    DEPENDS_ON_OTHERS = (
        14,
        "`node NAME`: it can be emptied, if others move or stop its External VMs",
    )
    INTERRUPTED = 130, "ended by Ctrl-C before there was an answer or a complete file"
    TERMINATED = 143, "ended by SIGTERM before there was an answer or a complete file"


class ExporterError(Exception):
    """The root. The message is for people: what was wrong, where, and what was expected."""


class CommandFailed(ExporterError):
    """Ends the command with `exit_code`, after the message was printed or logged."""

    exit_code: ClassVar[Exit]
