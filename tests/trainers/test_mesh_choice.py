"""The mesh of a run that names none: whole weights where they fit and are faster, and the same when it resumes."""

import dataclasses
import re

import jax
import pytest

from liger_jax.planner import devices
from liger_jax.planner.architectures import architecture
from liger_jax.planner.devices import GIB
from liger_jax.planner.links import Links
from liger_jax.trainers import decided_run, memory, mesh_choice, policy
from liger_jax.trainers.finetune_options import FinetuneOptions
from liger_jax.trainers.grpo_options import GrpoOptions
from liger_jax.trainers.options import Settings
from liger_jax.training import meshes
from liger_jax.training.meshes import parse_mesh

MESHES = [parse_mesh("fsdp=4"), parse_mesh("data=2,fsdp=2"), parse_mesh("data=4")]
ADAPTERS = dict(lora=16)


@pytest.fixture
def choose(monkeypatch):
    """A function that chooses for four cards of so many GiB."""

    def choose(gib, before=None, mesh=None, rate=330e9, of_method=(), **options):
        size = int(gib * GIB)
        monkeypatch.setattr(mesh_choice, "links", lambda there: Links(rate, rate, rate))
        card = devices.Target("h200", "gpu", "A card", 1, size, "", size, size)
        monkeypatch.setattr(devices, "here", lambda: card)
        monkeypatch.setattr(mesh_choice.memory, "stored", lambda settings: before)
        settings = Settings.of(FinetuneOptions, model="m", data="d", batch=8, length=2048, mesh=mesh, **options)
        dtypes = settings.placement.precision(options.get("lora"), "bfloat16")
        model = architecture("llama-3-8b")
        return mesh_choice.by_time(settings, model, dict(dtypes, dtype="bfloat16"), [None] * 4, *of_method)(MESHES)

    return choose


def test_adapters_have_whole_weights_where_they_fit(choose):
    index, reason = choose(75, **ADAPTERS)
    assert index == 2
    told = "0 ms of a step to send and update weights, and to compute again, where fsdp=4 takes "
    assert reason.startswith(told)
    index, reason = choose(14, rate=30e9, **ADAPTERS)  # half of the weights fit
    assert index == 1 and "fsdp=4 takes" in reason
    assert choose(14, **ADAPTERS)[0] == 0  # over fast links layers that keep products save more
    assert choose(8, **ADAPTERS) == (0, "since the weights do not fit whole on each device")
    assert choose(1, **ADAPTERS)[0] == 0  # and the estimate of memory refuses it


def test_trained_weights_are_split(choose):
    index, reason = choose(1000)
    assert index == 0 and "where data=4 takes" in reason
    assert choose(75) == (0, "since the weights do not fit whole on each device")


def test_a_teacher_must_fit_beside_the_whole_weights(choose):
    def needs(sizes):
        return memory.TeacherMemory(lambda cuts: 60 * GIB // sizes["fsdp"])

    assert choose(75, **ADAPTERS)[0] == 2
    assert choose(75, of_method=[needs], **ADAPTERS)[0] == 1
    before = lambda sizes: dataclasses.replace(needs(sizes), stays=False)  # beside the student's weights alone
    assert choose(85, of_method=[before], **ADAPTERS)[0] == 2


def test_a_run_that_samples_has_whole_weights_wherever_they_fit(choose):
    samples = dict(of_method=[lambda sizes: memory.TeacherMemory(), True])
    assert choose(1000, **samples) == (2, "each device samples with whole weights")
    assert choose(75, **samples) == (1, "since the weights do not fit whole on each device")
    assert choose(50, **samples)[0] == choose(1, **samples)[0] == 0


@pytest.mark.skipif(jax.device_count() < 4, reason="needs 4 devices, which a CPU simulates")
@pytest.mark.parametrize(
    ["batch", "line"],
    [
        (64, "devices: data=4 of 4 × {kind}; each device samples with whole weights"),
        (16, "devices: data=2 of 4 × {kind}; each device samples with whole weights; 2 are idle, since mesh='fsdp=4' "
         "splits the batch into 4 shards, which do not divide 2, the greatest common divisor of a step's prompts and "
         "of a micro-batch's rows. The nearest number that does is 2; or change the batch, or its micro-batches."),
    ],
)  # fmt: skip
@pytest.mark.parametrize("mesh", [None, "auto"])
def test_grpo_takes_all_devices(mesh, batch, line, monkeypatch, one_device_unless_a_mesh_is_named):
    monkeypatch.setattr(meshes, "chosen", one_device_unless_a_mesh_is_named)
    settings = Settings.of(GrpoOptions, model="m", data="d", reward="m:f", batch=batch, mesh=mesh)
    model, dtypes = architecture("llama-3-8b"), dict(dtype="bfloat16", param_dtype="bfloat16")
    card = devices.Target("h200", "gpu", "A card", 1, 1000 * GIB, "", 1000 * GIB, 1000 * GIB)
    monkeypatch.setattr(devices, "here", lambda: card)
    taken = decided_run._devices(settings, policy.TASK, model, dtypes, lambda layout: {})
    assert taken.line == line.format(kind=jax.devices()[0].device_kind)


def test_a_resumed_run_keeps_its_mesh_unless_it_has_other_devices_or_auto_is_asked_for(choose):
    kept = "as when the run began"
    assert choose(75, dict(mesh="data=2,fsdp=2"), **ADAPTERS) == (1, kept)
    assert choose(8, dict(mesh="data=4"), **ADAPTERS) == (2, kept)  # the estimate of memory says what to do
    assert choose(75, dict(batch=8), **ADAPTERS) == (0, kept)  # it began before choices were stored
    for before, mesh in (dict(mesh="data=2"), None), (dict(mesh="fsdp=4"), "auto"):
        assert choose(75, before, mesh, **ADAPTERS)[0] == 2


OF_EXPERTS = [parse_mesh(text) for text in ("fsdp=2", "data=2", "expert=2")]
OF_FOUR = [*MESHES, parse_mesh("expert=4")]


@pytest.fixture
def choose_of_mixture(monkeypatch):
    """A function that chooses for a mixture on cards of 100 GiB, and returns the index and the reason."""

    def choose(rows, length, found=OF_EXPERTS, before=None, samples=False, processes=1, platform="gpu", **options):
        monkeypatch.setattr(mesh_choice, "links", lambda there: Links(250e9, 250e9, 250e9))
        card = devices.Target("h200", platform, "A card", 1, 100 * GIB, "", 100 * GIB, 100 * GIB)
        monkeypatch.setattr(devices, "here", lambda: card)
        monkeypatch.setattr(jax, "process_count", lambda: processes)
        monkeypatch.setattr(mesh_choice.processes, "most", lambda number: number)
        monkeypatch.setattr(mesh_choice.memory, "stored", lambda settings: before)
        number = found[-1]["expert"]
        given = dict(remat="full", micro_batches=1) | options
        settings = Settings.of(FinetuneOptions, model="m", data="d", batch=rows * number, length=length, **given)
        dtypes = dict(dtype="bfloat16", param_dtype="bfloat16")
        model = architecture("olmoe-1b-7b-0924")
        of_method = [lambda sizes: memory.TeacherMemory(), samples]
        return mesh_choice.by_time(settings, model, dtypes, [None] * number, *of_method)(found)

    return choose


@pytest.mark.parametrize(
    ["rows", "length", "found", "options", "takes_experts"],
    [
        (2, 2048, OF_EXPERTS, {}, True),  # 0.07 of the bytes: measured, 0.80 of the time
        (4, 4096, OF_EXPERTS, {}, False),  # 0.28: measured, 0.99 of the time
        (2, 4096, OF_EXPERTS, {}, True),
        (4, 4096, OF_EXPERTS, dict(micro_batches=4), True),  # each of which would gather experts
        (1, 2048, OF_FOUR, {}, True),  # counted
        (2, 4096, OF_FOUR, {}, False),
        (2, 2048, OF_EXPERTS, dict(samples=True), False),
        (2, 2048, OF_EXPERTS, dict(processes=2), False),
        (2, 2048, OF_EXPERTS, dict(platform="tpu"), False),
        (2, 2048, OF_EXPERTS, dict(lora=16), False),  # experts are whole on each device
    ],
)
def test_experts_stay_on_their_devices_where_tokens_are_far_less_than_they(
    rows, length, found, options, takes_experts, choose_of_mixture
):
    index, reason = choose_of_mixture(rows, length, found, **options)
    assert (index == len(found) - 1 and found[index]["expert"] > 1) == takes_experts
    assert ("to send tokens in place of experts" in reason) == takes_experts


@pytest.mark.parametrize(
    ["student", "teacher", "samples", "number"],
    [
        ("olmoe-1b-7b-0924", None, False, 64),
        ("olmoe-1b-7b-0924", "llama-3-8b", False, 64),
        ("olmoe-1b-7b-0924", "mixtral-8x7b-v0.1", False, 8),  # both must be divided
        ("olmoe-1b-7b-0924", None, True, 0),
        ("llama-3-8b", "mixtral-8x7b-v0.1", False, 0),
    ],
)
def test_an_axis_of_experts_divides_those_of_student_and_teacher(student, teacher, samples, number):
    config, its = (None if name is None else architecture(name).config for name in (student, teacher))
    assert decided_run._experts(config, its, samples) == number


def test_a_mixture_that_is_resumed_keeps_the_mesh_that_it_began_with(choose_of_mixture):
    kept = "as when the run began"
    assert choose_of_mixture(2, 2048, before=dict(mesh="fsdp=2")) == (0, kept)
    assert choose_of_mixture(2, 2048, before=dict(batch=8)) == (0, kept)  # before choices were stored
    assert choose_of_mixture(4, 4096, before=dict(mesh="expert=2")) == (2, kept)
    assert choose_of_mixture(2, 2048, before=dict(mesh="fsdp=2"), mesh="auto")[0] == 2


def test_experts_are_gathered_where_their_own_mesh_does_not_fit(choose_of_mixture, monkeypatch):
    index, reason = choose_of_mixture(2, 2048)
    assert index == 2 and re.fullmatch(
        r"[\d.]+ ms of a step to send tokens in .*, where (data|fsdp)=2 takes .*", reason
    )
    whole = mesh_choice.choosing.chosen
    own = lambda run, **options: None if run.expert > 1 else whole(run, **options)
    monkeypatch.setattr(mesh_choice.choosing, "chosen", own)
    assert choose_of_mixture(2, 2048)[0] < 2


def test_all_processes_take_the_most_split_mesh_that_one_of_them_needs(choose, monkeypatch):
    monkeypatch.setattr(mesh_choice.processes, "most", lambda number: max(number, -1))
    assert choose(75, **ADAPTERS) == (1, "what fits the devices of all processes")


def test_what_is_stored_is_what_the_run_began_with():
    settings = Settings.of(FinetuneOptions, model="m", data="d")
    sizes = parse_mesh("data=2,fsdp=2")
    assert mesh_choice.to_store(settings, sizes, {}) == {"mesh": "data=2,fsdp=2"}
    assert mesh_choice.to_store(settings, sizes, {"mesh": "fsdp=8", "batch": 8}) == {"mesh": "fsdp=8"}
    assert mesh_choice.to_store(settings, sizes, {"batch": 8}) == {}
    fresh = dataclasses.replace(settings, folder=dataclasses.replace(settings.folder, fresh=True))
    assert mesh_choice.to_store(fresh, sizes, {"mesh": "fsdp=8"}) == {"mesh": "data=2,fsdp=2"}
