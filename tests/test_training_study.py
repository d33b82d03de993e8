"""The parts of benchmarks/training_study.py: text, paired seeds, controls that are really wrong, the verdict, and a run of it."""

import io
import json
import math
import os
import subprocess
import sys
import sysconfig
import tarfile
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from study import judge, report, text
from study.attentions import CONTROLS, RECIPE, exact, variant
from study.model import GPT, Size
from study.text import Text
from study.training import TINY, Run, Settings, Trainer, train

import lowbit_attn
from lowbit_attn import formats
from lowbit_attn.recipes import recipe_names

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "training_study.py"
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.bin"
    path.write_bytes(text.joined([f"document {number}: ".encode() + bytes([97 + number % 26]) * 300 for number in range(40)]))
    return path


@pytest.fixture(scope="module")
def data(corpus):
    return Text.read(corpus, TINY.size.context)


def qkv(tokens=160, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(1, 2, tokens, 128, generator=generator).bfloat16().requires_grad_() for _ in range(3)]


def gradients(attend, seed=0):
    inputs = qkv(seed=seed)
    output = attend(*inputs)
    grad = torch.randn(output.shape, generator=torch.Generator().manual_seed(9)).bfloat16()
    return output.detach(), torch.autograd.grad(output, inputs, grad)


class TestText:
    def test_whole_documents_are_held_out_and_none_is_lost(self, corpus, data):
        train_part, held_out = (bytes(x.tolist()).split(b"\0")[1:] for x in (data.train, data.validation))
        every = corpus.read_bytes().split(b"\0")[1:]
        assert held_out == every[::text.VALIDATION_EVERY]
        assert len(train_part) + len(held_out) == len(every)
        assert not set(train_part) & set(held_out)

    def test_a_text_that_is_too_short_is_refused(self, tmp_path):
        path = tmp_path / "short"
        path.write_bytes(text.joined([b"a" * 50] * 30))
        with pytest.raises(SystemExit, match=r"--text: .*short has 1428 bytes to train on and 102 held out in 30 documents"):
            Text.read(path, 102)

    def test_an_archive_gives_the_same_documents_whatever_the_order_of_its_files(self, tmp_path):
        files = {"d/docs/a.txt": b"prose", "d/b.py": b"code\0", "d/copy.py": b"prose", "d/locale/x.py": b"no",
                 "d/readme.txt": b"no", "d/empty.py": b" \n", "d/c.py": b"more code"}
        results = []
        for names in (list(files), list(reversed(files))):
            path = tmp_path / f"{names[0].replace('/', '-')}.tar.gz"
            with tarfile.open(path, "w:gz") as archive:
                for name in names:
                    entry = tarfile.TarInfo(name)
                    entry.size = len(files[name])
                    archive.addfile(entry, io.BytesIO(files[name]))
            results.append(text.documents(path))
        assert results[0] == results[1]
        assert sorted(results[0]) == [b"code", b"more code", b"prose"]

    def test_targets_are_the_bytes_that_follow(self):
        tokens, targets = text.windows(torch.arange(100, dtype=torch.uint8), torch.tensor([0, 89]), 10)
        assert tokens[1].tolist() == list(range(89, 99))
        assert torch.equal(targets, tokens + 1)

    def test_windows_stay_inside(self):
        assert text.training_starts(11, 1000, 4, 10, 0).unique().tolist() == [0]
        starts = text.validation_starts(1000, 7, 10)
        assert (int(starts[0]), int(starts[-1]), len(starts.unique())) == (0, 989, 7)


class TestPairing:
    def test_a_seed_gives_one_model_and_one_order_of_data_whatever_the_attention(self, data):
        first, second = (Trainer(variant(name), 3, TINY, data, CPU, False) for name in ("bf16", RECIPE))
        assert torch.equal(first.starts, second.starts)
        for name, parameter in first.model.state_dict().items():
            assert torch.equal(parameter, second.model.state_dict()[name]), name

    def test_other_seeds_have_other_models_and_orders(self, data):
        first, second = (Trainer(variant("bf16"), seed, TINY, data, CPU, False) for seed in (0, 1))
        assert not torch.equal(first.starts, second.starts)
        assert not torch.equal(first.model.head, second.model.head)

    def test_a_run_repeats_itself(self, data):
        runs = [train(variant("bf16"), 0, TINY, data, CPU, False, {}, lambda line: None) for _ in range(2)]
        assert runs[0].train_loss == runs[1].train_loss
        assert runs[0].final == runs[1].final

    def test_the_models_differ_by_attention_alone(self):
        model = GPT(Size(layers=2, width=256, context=64), 0)
        tokens = torch.randint(256, (1, 64))
        one, other = (model(tokens, attend) for attend in (exact, variant("bf16").attend))
        assert torch.allclose(one, other, atol=1e-5)

    def test_the_model_is_causal(self):
        model = GPT(Size(layers=2, width=256, context=64), 0)
        tokens = torch.randint(256, (1, 64))
        changed = tokens.clone()
        changed[:, 40:] += 1
        old, new = (model(x % 256, exact) for x in (tokens, changed))
        assert torch.allclose(old[:, :40], new[:, :40], atol=1e-6)
        assert not torch.allclose(old[:, 40], new[:, 40], atol=1e-3)

    def test_every_step_has_the_rate_of_the_schedule(self, data):
        trainer = Trainer(variant("bf16"), 0, TINY, data, CPU, False)
        for number in (0, 3):
            trainer.step(number)
            assert [float(group["lr"]) for group in trainer.optimizer.param_groups] == [float(TINY.learning_rates()[number])] * 2

    def test_rates_warm_up_and_fall_to_a_tenth(self):
        rates = Settings(steps=100, warm_up=10, peak_lr=1.0).learning_rates()
        assert rates[:10].tolist() == pytest.approx([0.1 * (step + 1) for step in range(10)])
        assert float(rates[-1]) == pytest.approx(0.1, abs=1e-3)
        assert bool((rates[10:].diff() < 0).all())


class TestControls:
    def test_wrong_do_is_a_coarse_do_with_the_d_of_the_finer_one(self):
        inputs = qkv()
        grad = torch.randn(inputs[0].shape, generator=torch.Generator().manual_seed(9)).bfloat16()
        coarse = formats.round_to_blocks(grad, formats.E2M1, formats.block_layout("token_block")).bfloat16()
        output, lse = lowbit_attn.attention(*inputs, recipe=RECIPE, is_causal=True, return_lse=True)
        matched = torch.autograd.grad(output, inputs, coarse, retain_graph=True)
        wrong_output = CONTROLS["wrong-dO"](*inputs)
        wrong = torch.autograd.grad(wrong_output, inputs, grad)
        assert torch.equal(output, wrong_output)
        assert torch.equal(wrong[2], matched[2])
        # dS = P (dP - D): the D of another dO adds -P times the difference, which is what a gradient of lse adds.
        difference = (output.detach().float() * (grad.float() - coarse.float())).sum(-1)
        added = torch.autograd.grad(lse, inputs[:2], -difference)
        for part, other, more in zip(wrong[:2], matched[:2], added, strict=True):
            moved = (part.float() - other.float()).norm()
            assert float(moved / other.float().norm()) > 0.05
            # What is left is the rounding of dS, to 2^-4 and once instead of twice: a third of what D moves here.
            assert float((part.float() - other.float() - more.float()).norm()) < 0.5 * float(moved)

    def test_wrong_p_gives_gradients_of_keys_that_the_forward_hid(self):
        output, (dq, _, dv) = gradients(variant(RECIPE).attend)
        wrong_output, (wrong_dq, _, wrong_dv) = gradients(CONTROLS["wrong-P"])
        assert torch.equal(output, wrong_output)
        # The first query sees one key, so that its weight is 1 whatever its score. The last query sees all: nothing is hidden.
        assert not dq[:, :, 0].any()
        assert wrong_dq[:, :, 0].any()
        assert torch.equal(dq[:, :, -1], wrong_dq[:, :, -1])
        assert float((wrong_dv - dv).norm() / dv.norm()) > 0.3

    @pytest.mark.parametrize(("name", "before"), [("leak-V-tensor", 128), ("leak-V-groups", 140)])
    def test_leaks_move_rows_before_the_changed_token_and_the_recipe_does_not(self, name, before):
        def moved(attend, rows):
            inputs = [x.detach() for x in qkv()]
            old = attend(*inputs)
            changed = inputs[2].clone()
            changed[:, :, 140] *= 64
            return float((attend(inputs[0], inputs[1], changed) - old)[:, :, :rows].float().norm())

        assert moved(variant(RECIPE).attend, 128) == 0
        assert moved(CONTROLS[name], before) > 3 * moved(variant(RECIPE).attend, before)

    def test_gradients_pass_straight_through_a_leaking_v(self):
        _, (_, _, honest) = gradients(variant(RECIPE).attend)
        for name in ("leak-V-tensor", "leak-V-groups"):
            _, (_, _, wrong) = gradients(CONTROLS[name])
            assert torch.equal(wrong, honest)

    def test_only_what_trains_is_a_variant(self):
        kinds = {name: variant(name).kind for name in ("bf16", RECIPE, *CONTROLS)}
        assert list(kinds.values()) == ["bf16", "recipe", "mismatch", "mismatch", "leak", "leak"]
        assert not set(CONTROLS) & set(recipe_names())
        with pytest.raises(SystemExit, match="--only: got 'mxfp8_fast'"):
            variant("mxfp8_fast")


@pytest.mark.full
@pytest.mark.parametrize("name", list(CONTROLS))
def test_a_control_goes_wrong_in_a_hundred_steps(tmp_path_factory, name):
    path = tmp_path_factory.mktemp("text") / "stdlib.bin"
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    path.write_bytes(text.joined([source.read_bytes().replace(b"\0", b"") for source in sources]))
    settings = Settings(Size(layers=2, width=128, context=128), steps=600, control_steps=100, batch=4, peak_lr=4e-3, warm_up=50,
                        evaluate_every=50, windows=16)
    data = Text.read(path, settings.size.context)
    honest, control = (train(replace(variant(each), kind="mismatch"), 0, settings, data, CPU, False, {}, lambda line: None)
                       for each in (RECIPE, name))
    assert honest.diverged_at is None
    assert honest.leak["blocks"] == 0
    assert judge.went_wrong(control, honest, judge.TOLERANCE)


def made(name, kind, seed, own, above=0.0, **changes):
    """A finished run with flat curves."""
    steps = range(250, 3001, 250)
    settings = json.loads(json.dumps(asdict(Settings())))
    run = Run(name, kind, seed, settings, {"sha256": "0" * 64, "train_bytes": 9, "validation_bytes": 1},
              {"device": "a device", "torch": "2", "backend": "hopper"}, "CUDA graph", [own] * 3000, [0.5] * 3000,
              [{"step": step, "own": own, "exact": own + above} for step in steps], {"own": own, "exact": own + above},
              {"blocks": 0.0, "within": 0.01})
    return replace(run, **changes)


class TestVerdict:
    def test_the_tolerance_is_five_thousandths_or_twice_the_standard_error(self):
        assert judge.tolerance([1.0, 1.001, 0.999]) == 0.005
        assert judge.tolerance([1.0, 1.1, 0.9]) == pytest.approx(2 * 0.1 / math.sqrt(3))
        assert judge.tolerance([1.0]) == 0.005

    @pytest.mark.parametrize(("difference", "above", "holds"), [(0.004, 0.0, True), (0.006, 0.0, False), (0.001, 0.006, False),
                                                                (-0.02, 0.0, True)])
    def test_the_larger_of_the_two_gaps_counts(self, difference, above, holds):
        runs = [made("bf16", "bf16", 0, 1.0), made(RECIPE, "recipe", 0, 1.0 + difference, above)]
        assert judge.gap(runs, RECIPE).holds is holds

    def test_seeds_are_paired(self):
        runs = [made("bf16", "bf16", seed, 1.0 + seed) for seed in (0, 1, 2)]
        runs += [made(RECIPE, "recipe", seed, 1.001 + seed) for seed in (1, 2, 3)]
        assert judge.gap(runs, RECIPE).own == {1: pytest.approx(0.001), 2: pytest.approx(0.001)}

    def test_a_seed_that_diverged_fails(self):
        runs = [made("bf16", "bf16", 0, 1.0), made("bf16", "bf16", 1, 1.0), made(RECIPE, "recipe", 0, 1.0),
                made(RECIPE, "recipe", 1, 1.0, final=None, diverged_at=7)]
        assert not judge.gap(runs, RECIPE).holds

    @pytest.mark.parametrize(("changes", "said"), [
        ({"diverged_at": 12}, "not finite from step 12"),
        ({"grad_norm": [0.5, 6.0]}, "gradient norm 6, 12 times"),
        ({"evaluations": [{"step": 1000, "own": 1.1, "exact": 1.1}]}, "+0.1000 nats through exact attention at step 1000"),
        ({"evaluations": [{"step": 1000, "own": 0.9, "exact": 1.0}]}, "0.1000 nats better through its own attention"),
        ({"leak": {"blocks": 0.1, "within": 0.0}}, "outputs of earlier blocks by 10.00%"),
        ({"leak": {"blocks": 0.0, "within": 0.2}}, "their own block by 20.00%, 1.00% in mxfp8"),
    ])
    def test_every_way_to_go_wrong_is_seen(self, changes, said):
        honest = made(RECIPE, "recipe", 0, 1.0)
        [found, *others] = judge.went_wrong(made("wrong-P", "mismatch", 0, 1.0, **changes), honest, 0.005)
        assert not others
        assert said in found

    def test_a_change_within_rounding_is_no_leak(self):
        honest, control = (made(RECIPE, "recipe", 0, 1.0, leak={"blocks": 0.0, "within": within}) for within in (1e-4, 1e-3))
        assert judge.went_wrong(control, honest, 0.005) == []

    def test_an_unspoiled_run_has_nothing_wrong(self):
        assert judge.went_wrong(made("wrong-P", "mismatch", 0, 1.0), made(RECIPE, "recipe", 0, 1.0), 0.005) == []


class TestReport:
    @pytest.fixture
    def docs(self, tmp_path):
        (tmp_path / "training.md").write_text(f"# Title\n\n{report.BEGIN}\nold\n{report.END}\n\nAfter.\n")
        return tmp_path

    def test_without_runs_it_says_so(self, docs, tmp_path):
        assert report.write(tmp_path / "none", docs) == "Not measured yet."
        assert "Not measured yet." in (docs / "training.md").read_text()
        assert "old" not in (docs / "training.md").read_text()

    def test_it_replaces_what_it_wrote_and_leaves_the_rest(self, docs, tmp_path):
        folder = tmp_path / "runs"
        folder.mkdir()
        runs = [made("bf16", "bf16", 0, 1.0), made(RECIPE, "recipe", 0, 1.02), made("wrong-dO", "mismatch", 0, 1.5),
                made("leak-V-tensor", "leak", 0, 1.02)]
        numerics = {"step": 3000, "layer": 5, "flushed": {"ds": 0.0123, "p": 0.1, "do": 0.0}, "saturated": {},
                    "cosine": {"grad_query": 0.998, "grad_key": 0.998, "grad_value": 0.999}}
        runs[1].numerics.append(numerics)
        for run in runs:
            (folder / f"run-{run.variant}.json").write_text(json.dumps(asdict(run)))
        found = [report.write(folder, docs) for _ in range(2)]
        page = (docs / "training.md").read_text()
        assert found[0] == found[1]
        assert page.startswith("# Title\n")
        assert page.endswith("After.\n")
        assert page.count(found[0]) == 1
        assert (docs / report.PICTURE).stat().st_size > 10_000
        for said in ("| `mxfp8` | 0 | 1.0200 | 1.0200 |", "**not within** it", "+0.4800 nats through exact attention",
                     "| `leak-V-tensor` | 0 | 3000 | **nothing that this study sees** |", "| `mxfp8` | 0 | 3000 | 5 | 1.230% |"):
            assert said in page, said

    def test_a_page_without_marks_is_refused(self, tmp_path):
        (tmp_path / "training.md").write_text("# Title\n")
        with pytest.raises(SystemExit, match="lacks the marks"):
            report.write(tmp_path / "none", tmp_path)

    def test_runs_of_different_settings_are_not_mixed(self, tmp_path):
        for number, settings in enumerate((Settings(), TINY)):
            run = made("bf16", "bf16", number, 1.0, settings=json.loads(json.dumps(asdict(settings))))
            (tmp_path / f"run-{number}.json").write_text(json.dumps(asdict(run)))
        with pytest.raises(SystemExit, match="different settings"):
            judge.load(tmp_path)

    def test_the_page_of_this_repository_has_the_marks(self):
        page = (SCRIPT.parents[1] / "docs" / "training.md").read_text()
        assert page.count(report.BEGIN) == page.count(report.END) == 1


def script(*arguments):
    return subprocess.run([sys.executable, SCRIPT, *map(str, arguments)], text=True, capture_output=True, check=False,
                          env=os.environ | {"PYTHONPATH": str(SCRIPT.parents[1])})


def test_the_study_runs_resumes_and_refuses_other_settings(corpus, tmp_path):
    arguments = ("--text", corpus, "--out", tmp_path, "--tiny", "--device", "cpu")
    first = script(*arguments, "--only", "bf16:0,mxfp8:0,leak-V-groups:0")
    assert first.returncode == 0, first.stderr
    assert first.stdout.endswith("complete\n")
    runs = judge.load(tmp_path)
    assert [(run.variant, len(run.train_loss), len(run.evaluations)) for run in runs] == [
        ("bf16", TINY.steps, 3), ("mxfp8", TINY.steps, 3), ("leak-V-groups", TINY.control_steps, 2)]
    bf16, mxfp8, control = runs
    # Same weights, same bytes: the first losses differ by what quantization does to an untrained model's attention.
    assert bf16.train_loss[0] == pytest.approx(mxfp8.train_loss[0], abs=5e-3)
    assert bf16.train_loss[0] != mxfp8.train_loss[0]
    assert bf16.train_loss[-1] < bf16.train_loss[0] - 0.5
    assert mxfp8.leak["blocks"] == bf16.leak["blocks"] == bf16.leak["within"] == 0
    assert {entry["layer"] for entry in mxfp8.numerics} == {0, 1}
    assert control.final is None
    assert judge.gap(runs, "mxfp8").holds

    again = script(*arguments, "--only", "mxfp8:0,bf16:0")
    assert again.stdout == "complete\n"
    other = script(*arguments, "--only", "bf16:0", "--steps", "7")
    assert other.returncode == 1
    assert "was made with other settings" in other.stderr
    assert "is left" in script(*arguments, "--only", "bf16:1", "--seconds", "0").stdout


def test_arguments_that_name_no_run_are_refused(corpus, tmp_path):
    result = script("--text", corpus, "--out", tmp_path, "--tiny", "--only", "mxfp8")
    assert result.returncode == 1
    assert "--only: got 'mxfp8'; accepted: VARIANT:SEED" in result.stderr
