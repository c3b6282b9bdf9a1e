"""The serving loop against merged weights, and what it does to leases."""

import contextlib
import dataclasses
import re

import numpy as np
import pytest

from lorajax import LoraSpec
from lorajax.engine import Engine, Request, Steps, eos_token_ids
from lorajax.models import load_model
from lorajax.runtime import AdapterManager
from tests.engine import tiny

# One worker compiles the steps for all of these.
pytestmark = [pytest.mark.xdist_group("engine"), pytest.mark.usefixtures("quick_compiles")]

MIX = {"sql": 0.5, "chat": -0.75}
#: Adapters take 1, 1, 2, 1 and 4 slots; there are 4.
CHOICES = [None, "sql", "deep", "law", None, MIX, "phi", "chat", "deep"]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return tiny.write(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def steps(files):
    return Steps(load_model(files[0]), keep_logits=True)


@pytest.fixture
def manager(files):
    spec = LoraSpec.from_hf_config(files[0], num_slots=4, slot_rank=16, dtype="float32")
    return AdapterManager(spec, sources=files[1])


def make_engine(steps, manager, **kwargs):
    return Engine(steps, manager, **{"num_rows": 4, "max_length": 64, **kwargs})


def requests(choices=CHOICES, max_tokens=6):
    return [
        Request(str(i), tiny.prompt(i), max_tokens, adapter) for i, adapter in enumerate(choices)
    ]


def serve(engine, asked):
    results = list(engine.serve(asked))
    assert sorted(r.request.id for r in results) == sorted(r.id for r in asked)
    return {r.request.id: r for r in results}


def nobody_holds_a_lease(manager):
    return all(r.leases == 0 for r in manager.resident.values())


def check(result, eos=frozenset()):
    request = result.request
    tokens, logprobs = tiny.merged_greedy(
        request.adapter, request.prompt_ids, request.max_tokens, eos
    )
    assert result.error is None
    assert list(result.token_ids) == tokens
    np.testing.assert_allclose(result.logprobs, logprobs, rtol=1e-5, atol=1e-5)


def test_a_mixed_batch_equals_merged_weights_with_more_adapters_than_slots(steps, manager):
    for result in serve(make_engine(steps, manager), requests()).values():
        check(result)
    assert manager.stats.evictions > 0
    assert nobody_holds_a_lease(manager)


def test_adapters_change_the_tokens():
    """Else the test above would say little."""
    texts = {tuple(tiny.merged_greedy(c, tiny.prompt(0), 6)[0]) for c in tiny.ADAPTERS}
    texts.add(tuple(tiny.merged_greedy(None, tiny.prompt(0), 6)[0]))
    assert len(texts) > len(tiny.ADAPTERS) // 2


def test_eos_ends_a_continuation_and_is_part_of_it(steps, manager):
    plain = serve(make_engine(steps, manager), requests(max_tokens=12))
    eos = frozenset({plain["1"].token_ids[2], plain["4"].token_ids[4]})
    ended = serve(make_engine(steps, manager, eos_ids=eos), requests(max_tokens=12))
    for result in ended.values():
        check(result, eos)
    assert ended["1"].token_ids[-1] in eos
    assert len(ended["1"].token_ids) <= 3
    assert nobody_holds_a_lease(manager)


def test_rows_do_not_depend_on_their_neighbours(steps, manager):
    asked = requests()
    together = serve(make_engine(steps, manager), asked)
    backwards = serve(make_engine(steps, manager), asked[::-1])
    for i, result in together.items():
        assert result.token_ids == backwards[i].token_ids


def test_nothing_compiles_after_warm_up(steps, manager, compiles):
    engine = make_engine(steps, manager)
    engine.warm_up(20)
    asked = requests()
    asked[3] = dataclasses.replace(asked[3], prompt_ids=tiny.prompt(3, 20))
    with compiles.none():
        serve(engine, asked)
        serve(engine, requests(CHOICES[::-1], max_tokens=3))
        serve(engine, requests(["phi", {"law": 2.0, "chat": 0.1}, None]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"adapter": "sqll"}, r"got 'sqll'.*sql"),
        ({"adapter": {"sql": float("nan")}}, r"weight.*nan"),
        ({"adapter": {"law": 1.0, "deep": 1.0}}, r"slots"),
        ({"prompt_ids": ()}, r"a prompt must have a token"),
        ({"prompt_ids": (1, 64)}, r"token ids must be in \[0, 64\); got 64"),
        ({"prompt_ids": (-1,)}, r"token ids must be in \[0, 64\); got -1"),
        ({"prompt_ids": (1,) * 60}, r"must fit 64 positions; got 60 \+ 6"),
        ({"max_tokens": 0}, r"max_tokens must be at least 1; got 0"),
    ],
)
def test_a_bad_request_gets_an_error_and_the_others_are_served(steps, manager, change, message):
    asked = requests()
    asked[2] = dataclasses.replace(asked[2], **change)
    results = serve(make_engine(steps, manager), asked)
    error = results.pop("2").error
    assert error is not None
    assert re.search(message, error)
    for result in results.values():
        check(result)
    assert nobody_holds_a_lease(manager)


def explosive(manager):
    """An adapter with finite weights whose activations overflow."""
    recipe = dataclasses.replace(tiny.ADAPTERS["sql"].recipe, name="boom")
    boom = tiny.synthetic.make_adapter(tiny.BASE, recipe, strength=1e30)
    manager.load("boom", config=boom.config, tensors=boom.tensors)


def test_an_error_in_mid_run_releases_its_lease_and_spoils_nobody(steps, manager):
    explosive(manager)
    choices = [*CHOICES]
    choices[3:3] = ["boom"]
    results = serve(make_engine(steps, manager), requests(choices))
    boom = results.pop("3")
    assert boom.error is not None
    assert "logits must be finite" in boom.error
    assert "'boom'" in boom.error
    assert boom.token_ids == ()
    for result in results.values():
        check(result)
    assert nobody_holds_a_lease(manager)


def test_an_adapter_that_breaks_after_registration_fails_only_its_requests(
    steps, manager, tmp_path
):
    manager.register("late", tmp_path / "nothing-here")
    results = serve(make_engine(steps, manager), requests(["late", None, "chat"]))
    assert results["0"].error is not None
    assert "late" in results["0"].error
    check(results["1"])
    check(results["2"])
    assert nobody_holds_a_lease(manager)


def test_closing_the_iterator_releases_all_leases(steps, manager):
    serving = make_engine(steps, manager).serve(requests(max_tokens=9))
    next(serving)
    assert not nobody_holds_a_lease(manager)
    serving.close()
    assert nobody_holds_a_lease(manager)


def test_a_failing_step_releases_all_leases(steps, manager, monkeypatch):
    engine = make_engine(steps, manager)

    def fail(*_):
        raise RuntimeError("device lost")

    monkeypatch.setattr(engine, "steps", _Failing(steps, fail))
    with pytest.raises(RuntimeError, match="device lost"):
        list(engine.serve(requests()))
    assert nobody_holds_a_lease(manager)


class _Failing:
    """Steps whose decode fails."""

    def __init__(self, steps, decode):
        self.init_cache, self.prefill, self.decode = steps.init_cache, steps.prefill, decode
        self.row_shards = steps.row_shards


def test_base_requests_do_not_wait_for_adapters(steps, manager):
    order = [
        r.request.id
        for r in make_engine(steps, manager).serve(requests(["deep", "law", None, None]))
    ]
    assert order.index("1") == 3


def test_another_user_of_the_pool_makes_a_request_wait_or_fail_but_never_hang(steps, manager):
    with manager.lease(["law", "chat"]):
        results = serve(make_engine(steps, manager), requests(["deep", "sql", None]))
    assert results["0"].error is not None
    assert "law" in results["0"].error
    check(results["1"])
    check(results["2"])


def test_an_adapter_that_is_unloaded_fails_who_waits_for_it_and_nobody_else(steps, manager):
    asked = requests(["deep", "sql", "chat", "sql", None], max_tokens=4)
    serving = make_engine(steps, manager, num_rows=1).serve(asked)
    results = [next(serving)]
    manager.unload("sql")
    results = {r.request.id: r for r in [*results, *serving]}
    assert sorted(results) == ["0", "1", "2", "3", "4"]
    for i in "13":
        assert results[i].error is not None
        assert "'sql'" in results[i].error
    for i in "024":
        check(results[i])
    assert nobody_holds_a_lease(manager)


def test_a_request_that_loses_a_race_for_slots_tries_again(steps, manager, monkeypatch):
    monkeypatch.setattr(manager, "can_admit", lambda rows: True)
    results = serve(make_engine(steps, manager), requests(["deep", "law", "chat", None]))
    for result in results.values():
        check(result)


def test_a_mix_of_zero_weights_is_base(steps, manager):
    results = serve(make_engine(steps, manager), requests([{"deep": 0.0}, {}]))
    for result in results.values():
        base = dataclasses.replace(result.request, adapter=None)
        check(dataclasses.replace(result, request=base))
    assert manager.stats.loads == 0


def test_logits_are_kept_if_asked_for(steps, manager):
    (result,) = make_engine(steps, manager).serve(requests(["sql"]))
    assert result.logits is not None
    assert result.logits.shape == (6, tiny.BASE.vocab_size)
    np.testing.assert_array_equal(result.logits.argmax(-1), result.token_ids)


@pytest.mark.oracle
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_greedy_generate_of_transformers_and_peft_agrees(files, steps, manager):
    """For each adapter that names the base's modules; eos as transformers reads it."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    peft = pytest.importorskip("peft")
    base = transformers.AutoModelForCausalLM.from_pretrained(files[0])
    names = [n for n in tiny.ADAPTERS if n != "phi"]
    model = peft.PeftModel.from_pretrained(base, files[1][names[0]], adapter_name=names[0])
    for name in names[1:]:
        model.load_adapter(files[1][name], adapter_name=name)
    asked = requests([*names, *names, None], max_tokens=30)
    eos = frozenset({7, *eos_token_ids(files[0])})
    results = serve(make_engine(steps, manager, eos_ids=eos), asked)
    ended = 0
    for result in results.values():
        ids = torch.tensor([result.request.prompt_ids])
        with contextlib.ExitStack() as stack:
            if result.request.adapter is None:
                stack.enter_context(model.disable_adapter())
            else:
                model.set_adapter(result.request.adapter)
            out = model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=30,
                do_sample=False,
                eos_token_id=sorted(eos),
                pad_token_id=0,
                output_logits=True,
                return_dict_in_generate=True,
            )
        tokens = out.sequences[0, ids.shape[1] :].tolist()
        assert list(result.token_ids) == tokens
        logits = torch.cat(out.logits).numpy()
        np.testing.assert_allclose(result.logits, logits, atol=1e-5 * np.abs(logits).max())
        ended += tokens[-1] in eos
    assert ended > 0
