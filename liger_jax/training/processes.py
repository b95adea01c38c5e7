"""Several processes that train one model: how they start, agree, write files once, and end together.

Each process runs the same program on its own devices, and holds its own shard of every array. Only the first one writes
files: where all would write the same one, `by_first` lets it write alone. In a single process all of this does nothing.

A process that dies would leave the others in a collective that never ends. So each sends a heartbeat to JAX's
coordination service every two seconds, and a thread ends this process once another one has sent none for
`SILENT_SECONDS`. The service runs in process 0. The others connect to it through a `Relay`, which notices when that
process dies.
"""

import contextlib
import itertools
import json
import os
import re
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import jax
import numpy as np

from liger_jax.ops.place import jax_service
from liger_jax.training.relay import Relay

BEAT_SECONDS, SILENT_SECONDS = 2.0, 30.0
_PLACE = re.compile(r"(.+:(\d+)),(\d+)/(\d+)")  # HOST:PORT,INDEX/NUMBER
_ENDED = "ended"
_NAMED = 3  # differences that a message names
_barriers = itertools.count()
_refused = threading.Event()  # the exit code of all processes if they differ


def begin(place: str) -> None:
    """Joins the processes of a run, before JAX has devices.

    `place`: "HOST:PORT,INDEX/NUMBER", the address at which process 0 listens, this process's index from 0, and how many
    there are; empty to let JAX read these from the environment, as under SLURM, Open MPI or on a cloud TPU.
    """
    options: dict[str, Any] = dict(heartbeat_timeout_seconds=100, shutdown_timeout_seconds=20)
    if place:
        match = _PLACE.fullmatch(place)
        if match is None or int(match[3]) >= int(match[4]) or not 0 < int(match[2]) < 2**16:
            raise ValueError(
                f"distributed={place!r} must be HOST:PORT,INDEX/NUMBER, where process 0 listens, with a port from 1 to "
                "65535, this process's index from 0 and how many there are, as in 'host0:1234,0/2'."
            )
        options |= dict(coordinator_address=match[1], process_id=int(match[3]), num_processes=int(match[4]))
        options |= dict(cluster_detection_method="deactivate")
    if jax.distributed.is_initialized():
        raise ValueError(
            "JAX has joined its processes already. Call processes.begin once, and instead of "
            "jax.distributed.initialize: it also watches whether the other processes are alive."
        )
    if _has_devices():
        raise ValueError("JAX has initialised its devices for this process only. Call processes.begin first.")
    if options.get("process_id") == 0:
        _check_port(place, int(options["coordinator_address"].rpartition(":")[2]))
    jax.config.update("jax_enable_recoverability", True)  # the service must not end processes when one has died
    relay = None
    try:
        address, index = (options["coordinator_address"], options["process_id"]) if place else _found()
        if address is not None and index and not getattr(jax.config, "jax_mtls_cert_file", None):
            relay = Relay(address)
            address = relay.address
        with _handlers_kept():
            _interruptible(lambda: _joined(**options | dict(coordinator_address=address)))
    except (RuntimeError, ValueError) as error:
        cure = "" if place else " Where JAX knows no cluster, pass HOST:PORT,INDEX/NUMBER, as in 'host0:1234,0/2'."
        raise ValueError(f"The processes do not find each other: {' '.join(str(error).split())}.{cure}") from error
    finally:
        if relay is not None:
            relay.close()
    if relay is not None:
        relay.watch(lambda how: None if _over.is_set() else _lose(0, how), SILENT_SECONDS)
    if jax.process_count() > 1:
        _watching.append(threading.Thread(target=_watch, args=(jax_service(),), name="watching processes", daemon=True))
        _watching[0].start()


def _check_port(place: str, port: int) -> None:
    """Checks that process 0 can listen there: JAX's service may crash if it cannot."""
    try:
        socket.create_server(("", port)).close()
    except OSError as error:
        why = os.strerror(error.errno or 0)
        raise ValueError(
            f"distributed={place!r}: process 0 cannot listen at port {port}: {why}. Pass another port to all processes."
        ) from error


def are_several() -> bool:
    """Whether `begin` has joined several processes. This does not initialise JAX's devices."""
    return bool(_watching)


def is_first() -> bool:
    """Whether this process is the one that writes files and prints."""
    return jax.process_index() == 0


def wait() -> None:
    """Waits until all processes have come here. Ctrl-C ends the wait."""
    if jax.process_count() > 1:
        name = f"liger_jax/barrier/{next(_barriers)}"  # every process reaches the barriers in the same order
        _interruptible(lambda: jax_service().wait_at_barrier(name, timeout_in_ms=24 * 3600 * 1000))


def check_same(what: str, values: Mapping[str, Any]) -> None:
    """Checks that all processes have the same values, such as options: a difference would train wrongly in silence."""
    if jax.process_count() == 1:
        return
    answers = _of_all(dict(values))
    first = answers[0]
    for i, own in sorted(answers.items()):
        if names := [name for name in {**first, **own} if first.get(name) != own.get(name)]:
            shown = ", ".join(f"{name}={own.get(name)!r} for {first.get(name)!r}" for name in names[:_NAMED])
            more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
            _refused.set()
            raise ValueError(
                f"Process {i} has different {what} than process 0: {shown}{more}. All processes of a run need the same "
                "ones."
            )


def check_shared(folder: Path) -> None:
    """Checks that all processes share the folder: with separate folders of one name they would wait forever."""
    if jax.process_count() == 1:
        return
    marker = tempfile.NamedTemporaryFile(prefix=".shared-", dir=folder) if is_first() else None
    name = _of_all(os.path.basename(marker.name) if marker else "")[0]
    answers = _of_all([(folder / name).exists(), os.path.abspath(folder)])
    if marker is not None:
        marker.close()
    for i, (is_seen, path) in sorted(answers.items()):
        if not is_seen:
            _refused.set()
            raise ValueError(
                f"Process {i} does not see what process 0 writes: its folder is {path}, and process 0's is "
                f"{answers[0][1]}. All processes of a run need one folder, on a disk that they share."
            )


def of_first(work: Callable[[], Any]) -> Any:
    """The JSON value that a function returns in the first process, for all of them. The others wait for it."""
    return work() if jax.process_count() == 1 else _of_all(work() if is_first() else None)[0]


def _of_all(value: Any) -> dict[int, Any]:
    """The JSON value that each process has sent, by its index."""
    place = f"liger_jax/said/{next(_barriers)}/"
    jax_service().key_value_set(f"{place}{jax.process_index()}", json.dumps(value, sort_keys=True))
    wait()
    answers = {int(key.rsplit("/", 1)[1]): json.loads(text) for key, text in jax_service().key_value_dir_get(place)}
    wait()  # before a process that raises ends the service
    jax_service().key_value_delete(f"{place}{jax.process_index()}")
    return answers


def by_first(work: Callable[[], Any]) -> None:
    """Calls a function in the first process, while the others wait."""
    if is_first():
        work()
    wait()


@contextlib.contextmanager
def first_before_others() -> Iterator[None]:
    """A context that the first process leaves before the others enter it, such as to make files for them."""
    if not is_first():
        wait()
    yield
    if is_first():
        wait()


@contextlib.contextmanager
def only_first_speaks() -> Iterator[None]:
    """A context in which the other processes print only errors."""
    if is_first():
        yield
        return
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        yield


def most(number: int) -> int:
    """The largest of the numbers that all processes have."""
    if jax.process_count() == 1:
        return number
    from jax.experimental import multihost_utils

    return int(np.max(multihost_utils.process_allgather(np.int32(number))))


def whole(x: jax.Array) -> np.ndarray:
    """The values of an array whose shards the processes hold, in each of them."""
    if x.is_fully_addressable or x.is_fully_replicated:
        return np.asarray(x)
    from jax.experimental import multihost_utils

    return np.asarray(multihost_utils.process_allgather(x, tiled=True))


def least(size: int) -> int:
    """The least of the sizes that all processes have: bytes, of several processes in whole MiB."""
    return size if jax.process_count() == 1 else -most(-(size // 2**20)) * 2**20


def agreed(received: list[int]) -> list[int]:
    """A value that any process has received, such as a signal, for all of them."""
    number = most(received[0] if received else 0)
    if number and not received:
        received.append(number)
    return received


def end(code: int, in_order: bool = True) -> int:
    """Ends this process's share of a run.

    `code`: the exit code. After an error the others are informed, and the process ends here. `in_order`: whether 0 and
    the codes of signals are those of all processes. Else such a code is an error, too.
    """
    if not are_several():
        return code
    if not in_order or code not in (0, *range(129, 160)):
        leave(code)
    wait()
    _over.set()
    if not _why:  # else the service may not answer
        _watching[0].join(SILENT_SECONDS)
        _tell(_ENDED)
    _leave_in_order()
    return code


def leave(code: int) -> NoReturn:
    """Ends this process at once, whatever its other threads are doing. The other processes of its run are informed."""
    _over.set()
    if are_several() and not _why:  # else the service may not answer
        _watching[0].join(2 * BEAT_SECONDS)
        telling = threading.Thread(target=_tell, args=(f"{_ENDED} {code}",), daemon=True)
        telling.start()
        telling.join(BEAT_SECONDS)
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    if _refused.is_set() and is_first():  # its end closes the service, and ends processes that are still in a call
        time.sleep(3 * BEAT_SECONDS)
    os._exit(code)  # JAX would wait for the others, and Python for its threads


def lost() -> str:
    """Waits for the reason why this process cannot go on, a sentence; empty if all others live."""
    if jax.process_count() > 1:
        begun = time.monotonic()
        while time.monotonic() - begun < SILENT_SECONDS + 5:
            if _why:
                return _why[0]
            time.sleep(0.2)
    return ""


_why: list[str] = []  # the sentence, once a process is lost
_watching: list[threading.Thread] = []
_over = threading.Event()  # this process is ending


def _joined(**options: Any) -> None:
    jax.distributed.initialize(**options)
    jax.process_count()  # waits until all processes have reported their devices


def _watch(client: Any) -> None:
    """Sends this process's heartbeats, and ends it when those of another process stop."""
    own, others = jax.process_index(), [i for i in range(jax.process_count()) if i != jax.process_index()]
    seen = {i: ("", time.monotonic()) for i in others}
    for beat in itertools.count():
        if _over.is_set():
            return
        try:
            client.key_value_set(_key(own), str(beat), True)
            reports = {int(key.rsplit("/", 1)[1]): value for key, value in client.key_value_dir_get("liger_jax/alive/")}
        except Exception as error:  # the service ran in process 0, and has ended with it
            if own == 0:
                return
            reports = {0: f"{_ENDED} {type(error).__name__}"}
        for i in others:
            value, now = reports.get(i, ""), time.monotonic()
            if value == _ENDED:
                return  # all processes are ending
            if value.startswith(_ENDED):
                return _lose(i, "has ended")
            if value != seen[i][0]:
                seen[i] = value, now
            elif now - seen[i][1] > SILENT_SECONDS:
                return _lose(i, f"has not been heard of for {SILENT_SECONDS:.0f} seconds")
        _over.wait(BEAT_SECONDS)


def _lose(i: int, how: str) -> None:
    """Ends the process, and says which other one is lost, unless the main thread does so within a moment."""
    _why.append(
        f"Process {i} of {jax.process_count()} {how}, so this one ends, too. Start all of them again, on as many "
        "devices or fewer: the run goes on from its newest checkpoint."
    )
    if _over.wait(3):
        time.sleep(3)  # for the main thread, which is in `end`
    else:
        print(_why[0], file=sys.stderr, flush=True)
    os._exit(2)


def _found() -> tuple[str | None, int | None]:
    """The service's address and this process's index, as `jax.distributed.initialize` finds them."""
    from jax._src import clusters  # JAX has no public way to them before it has joined the processes

    address, seconds = os.environ.get("JAX_COORDINATOR_ADDRESS"), 300
    detected = clusters.ClusterEnv.auto_detect_unset_distributed_params(address, None, None, [], None, seconds)
    return detected[0], detected[2]


def _leave_in_order() -> None:
    """Lets the others disconnect from JAX's coordination service before the first process, which runs it, ends."""
    if not is_first():
        jax.distributed.shutdown()
        return
    begun = time.monotonic()
    while time.monotonic() - begun < SILENT_SECONDS:
        reports = [value for _, value in jax_service().key_value_dir_get("liger_jax/alive/")]
        if all(value == _ENDED for value in reports):
            break
        time.sleep(0.1)
    time.sleep(1)


def _tell(text: str) -> None:
    with contextlib.suppress(Exception):  # the service may be gone
        jax_service().key_value_set(_key(jax.process_index()), text, True)


def _key(process: int) -> str:
    return f"liger_jax/alive/{process}"


@contextlib.contextmanager
def _handlers_kept() -> Iterator[None]:
    """A context that undoes JAX's own handler of SIGTERM, with which the signal would end nothing."""
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread() and handler is not None:
            signal.signal(signal.SIGTERM, handler)


def _has_devices() -> bool:
    from jax._src import xla_bridge  # JAX has no public way to know this without initialising them

    return xla_bridge.backends_are_initialized()


def _interruptible(work: Callable[[], Any]) -> None:
    """Calls a function in a thread: while a call waits in C++, Python would not handle Ctrl-C."""
    done, errors = threading.Event(), []

    def run():
        try:
            work()
        except BaseException as error:
            errors.append(error)
        finally:
            done.set()

    threading.Thread(target=run, name="waiting", daemon=True).start()
    done.wait()
    if errors:
        raise errors[0]
