"""Where the tests run, and under which rules.

    pytest --platform=cpu|gpu|tpu --part=i/n --cold --costs

The cases are the same everywhere. On a CPU the Pallas kernels run in their interpreters, through the public ops;
on a GPU or TPU they are compiled for it. What needs no accelerator is the CPU's alone (`is_for_the_cpu`).
"""

import collections
import gc
import itertools
import os
import secrets
import zlib
from pathlib import Path

import jax
import jaxtyping
import numpy as np
import pytest

from tests import _annotations, _compiled, _default_run, _devices

# Here and not in a hook of pytest's: tests/ops/conftest.py imports liger_jax before those run wherever it is named on
# the command line.
_annotations.check()

IMPLEMENTATIONS = {
    "cpu": ("xla", "triton:interpret", "mosaic_tpu:interpret"),
    "gpu": ("xla", "triton"),
    "tpu": ("xla", "mosaic_tpu"),
}
# How many compiled programs were there at the start; None where none are kept.
COMPILED = pytest.StashKey[int | None]()


def pytest_addoption(parser):
    parser.addoption("--seed", type=int, help="of all random inputs; the header of an earlier run tells its own")
    parser.addoption(
        "--platform", choices=tuple(IMPLEMENTATIONS), default="cpu", help="the device that the tests run on"
    )
    parser.addoption(
        "--part", type=part, default=(1, 1), metavar="i/n", help="runs the i-th of n parts of equal length"
    )
    parser.addoption("--costs", action="store_true", help="prints the seconds and the number of cases of each file")
    parser.addoption("--cold", action="store_true", help="compiles everything; on a GPU or TPU that is always so")


def part(text: str) -> tuple[int, int]:
    """The two numbers of `i/n`."""
    i, n = map(int, text.split("/"))
    if not 1 <= i <= n:
        raise ValueError(text)
    return i, n


def pytest_configure(config):
    # Compiled programs and traces stay in JAX's caches. Python's collector would walk through them at every 700th
    # new object, which took an eighth of the suite's time.
    gc.set_threshold(100_000)
    platforms = {"cpu": "cpu", "gpu": "cuda,cpu", "tpu": "tpu,cpu"}[config.getoption("--platform")]
    os.environ["JAX_PLATFORMS"] = platforms  # for the processes that tests start
    jax.config.update("jax_platforms", platforms)
    if config.getoption("--platform") == "gpu":
        _devices.share_cards()
    # Each simulated device needs a thread in each collective that is under way, and XLA has as many as the machine has
    # cores. On two cores, four devices that began forty programs stood still within 200 rounds; with 64 threads never.
    os.environ.setdefault("PJRT_NPROC", "64")
    # Before the first computation: four CPU devices serve the sharding tests, and code that runs once need not be fast.
    flags = [os.environ.get("XLA_FLAGS", ""), "--xla_force_host_platform_device_count=4"]
    if config.getoption("--platform") == "gpu":
        # XLA's own products in the library's first algorithm: to compile and time dozens of others for each product of
        # each test takes longer than all else.
        flags.append("--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false")
        flags.append("--xla_llvm_disable_expensive_passes=true")
    if platforms == "cpu":
        # LLVM in one piece and without its slow passes: a sixth less time.
        flags.append("--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true")
        flags.append("--xla_cpu_parallel_codegen_split_count=1")
        # XLA ends the process where a device comes to a collective 40 s after the others, as on a crowded machine the
        # last of four threads may.
        flags.append("--xla_cpu_collective_call_terminate_timeout_seconds=300")
        if jax.__version_info__ < (0, 11):  # a third less time in all; gone from newer versions
            flags.append("--xla_cpu_use_fusion_emitters=false")
    os.environ["XLA_FLAGS"] = " ".join(flags)
    _compiled.share_contexts()
    if platforms == "cpu" and not config.getoption("--cold"):
        config.stash[COMPILED] = _compiled.prepare()
        if config.stash[COMPILED] is not None:
            _compiled.keep()
    # Fresh inputs in every run; pytest-xdist's workers inherit the seed of the process that starts them.
    seed = config.getoption("--seed")
    os.environ["TEST_SEED"] = str(seed) if seed is not None else os.environ.get("TEST_SEED", str(secrets.randbits(32)))


def pytest_generate_tests(metafunc):
    """A test that takes `implementation` runs once for each kernel that its op has on this platform.

    A module whose op lacks a kernel says so: `KERNELS = ("xla", "triton")`. `FULL_KERNELS`, by their whole names, run
    in the full suite only.
    """
    if "implementation" in metafunc.fixturenames:
        kernels = getattr(metafunc.module, "KERNELS", ("xla", "triton", "mosaic_tpu"))
        full = getattr(metafunc.module, "FULL_KERNELS", ())
        names = IMPLEMENTATIONS[metafunc.config.getoption("--platform")]
        cases = [
            pytest.param(name, marks=[pytest.mark.full] if name in full else [])
            for name in names
            if name.partition(":")[0] in kernels
        ]
        metafunc.parametrize("implementation", cases)


def pytest_runtest_setup():
    _annotations.begin_test()


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config, items):
    for item in items:
        mark(item)
    yield  # -m and -k: parts of what they leave are equal
    if config.getoption("--platform") != "cpu":
        keep(config, items, [item for item in items if not is_for_the_cpu(item)])
    # Cases of one test take about as long as each other and stand side by side: each part gets every n-th of them.
    i, n = config.getoption("--part")
    keep(config, items, items[i - 1 :: n])


def mark(item):
    """Marks what the default run leaves out."""
    folder = Path(__file__).parent
    if isinstance(item, pytest.DoctestItem):
        item.add_marker(pytest.mark.example)
    elif item.path.is_relative_to(folder):
        if item.get_closest_marker("targets"):
            item.add_marker(pytest.mark.full)
        file = item.path.relative_to(folder).as_posix()
        if _default_run.is_an_example(file, item.name):
            item.add_marker(pytest.mark.example)
        if _default_run.is_for_the_full_run(file, item.name):
            item.add_marker(pytest.mark.full)


def keep(config, items, kept):
    """Deselects the others, which pytest then counts."""
    gone = {*items} - {*kept}
    config.hook.pytest_deselected(items=[item for item in items if item in gone])
    items[:] = kept


def is_for_the_cpu(item) -> bool:
    """Compilers for devices that are not there, simulators of other devices, the planner, the site and the wheel."""
    folders = {*item.path.relative_to(Path(__file__).parents[1]).parts}
    return (
        item.get_closest_marker("aot") is not None
        or ":interpret" in item.name
        or item.path.name == "test_tpu_races.py"
        or not folders.isdisjoint({"aot", "packaging", "benchmarks", "planner"})
    )


def pytest_report_header(config):
    i, n = config.getoption("--part")
    lines = [f"inputs: --platform={config.getoption('--platform')} --seed={os.environ['TEST_SEED']} --part={i}/{n}"]
    if compiled := config.stash.get(COMPILED, None):
        lines.append(f"warm: {compiled} compiled programs in {_compiled.FOLDER}; --cold compiles everything")
    else:
        lines.append("cold: everything is compiled" + (", and kept" if compiled == 0 else ""))
    if not _annotations.CHECKED:
        lines.append("annotations are not checked: beartype is not installed")
    if config.getoption("--platform") != "cpu":
        lines.append("left to `make test` on a CPU: compilers for absent devices, simulators, planner, site and wheel")
    return lines


def pytest_terminal_summary(terminalreporter, exitstatus, config):
    missing = [name for name in config.args if not (config.invocation_params.dir / name.partition("::")[0]).exists()]
    if missing:
        terminalreporter.write_line(f"there is no {', '.join(missing)}")
    elif exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
        terminalreporter.write_line(
            f"no case is left by -m {config.option.markexpr!r} and -k {config.option.keyword!r}; `make test-full` and "
            "`make examples` run the cases that `make test` leaves out (tests/_default_run.py)"
        )
    if config.getoption("--costs"):
        costs = collections.defaultdict(lambda: [0.0, 0])
        for report in itertools.chain(*terminalreporter.stats.values()):
            if isinstance(report, pytest.TestReport):
                cost = costs[report.nodeid.partition("::")[0]]
                cost[0] += report.duration
                cost[1] += report.when == "setup"
        terminalreporter.section("seconds and cases of each file")
        for file, (seconds, cases) in sorted(costs.items(), key=lambda item: item[1], reverse=True):
            terminalreporter.write_line(f"{seconds:8.1f} {cases:5d}  {file}")


@pytest.hookimpl(trylast=True)
def pytest_unconfigure():
    """Pytest has just collected what was lost; it and Python would walk through all traces again, for seconds."""
    gc.freeze()


@pytest.fixture(autouse=True)
def highest_precision():
    """Float32 products have full precision, where GPUs and TPUs use fewer bits by default. A test may set its own."""
    with jax.default_matmul_precision("highest"):
        yield


@pytest.fixture(scope="module", autouse=True)
def programs_that_fit():
    """Each of two workers of the full run would hold 8 GB of programs in the end."""
    yield
    _compiled.drop_beyond(3 << 30)


@pytest.fixture(scope="session")
def caches(tmp_path_factory):
    """The folder that tests have for the user's folder of caches, in which commands keep compiled programs."""
    return tmp_path_factory.mktemp("caches")


@pytest.fixture(autouse=True)
def no_cache_of_the_user(caches, monkeypatch):
    """Whatever a test or a process that it starts keeps, it keeps in `caches`."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(caches))


@pytest.fixture
def rng(request):
    """A NumPy generator of this test's own, from the run's seed."""
    return np.random.default_rng([int(os.environ["TEST_SEED"]), zlib.crc32(request.node.nodeid.encode())])


@pytest.fixture(scope="session")
def platform(request):
    return request.config.getoption("--platform")


@pytest.fixture
def devices():
    """Four devices for a mesh, or two where the platform has no more; see `_devices.several`."""
    with _devices.several() as found:
        yield found


@pytest.fixture
def unchecked_types():
    """Lets wrong arguments through to our own errors; elsewhere jaxtyping's annotations refuse them first."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
