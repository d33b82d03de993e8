"""`lowbit-attn accuracy`: every table at its published numbers, and its three output forms."""

import csv as csv_module

import pytest

from lowbit_attn.cli.measurements import ablation, normalization, proxies, scaling, training
from lowbit_attn.cli.measurements.settings import Comparison, Settings
from lowbit_attn.cli.measurements.table import HEADINGS, Line, Table

SMALL = Settings(seq=1024, heads=2, seeds=1, rows=128)
SAMPLE = Table("Title", "a paper", "few inputs", [
    Line("first", "error %", 1.25, 1.0, 0.1), Line("first", "cosine", 0.99999, 0.99998, 3e-4, 5), Line("a|b", "free", 2.0)],
    ("a note",))


def outside(table):
    return [line.cells() for line in table.lines if not line.holds]


class TestLine:
    @pytest.mark.parametrize(("measured", "holds"), [(1.0, True), (1.1, True), (0.9, True), (1.11, False), (0.89, False)])
    def test_tolerance_is_two_sided(self, measured, holds):
        assert Line("", "", measured, 1.0, 0.1 + 1e-12).holds == holds

    @pytest.mark.parametrize(("measured", "holds"), [(2.0, True), (0.9, True), (0.89, False)])
    def test_a_floor_is_one_sided(self, measured, holds):
        assert Line("", "", measured, 1.0, 0.1 + 1e-12, at_least=True).holds == holds

    def test_cells(self):
        assert Line("a", "b", 1.25, 1.0, 0.1, 2).cells() == ("a", "b", "1.25", "1.00", "+0.25", "0.1")
        assert Line("a", "b", 1.25, decimals=1).cells() == ("a", "b", "1.2", "", "", "")

    def test_nan_does_not_hold(self):
        assert not Line("", "", float("nan"), 1.0, 0.1).holds


class TestForms:
    def test_csv_keeps_full_precision(self):
        rows = list(csv_module.DictReader(SAMPLE.csv().splitlines()))
        assert list(rows[0]) == ["table", *HEADINGS]
        assert float(rows[1]["measured"]) == 0.99999
        assert (rows[2]["published"], rows[2]["difference"]) == ("", "")

    def test_markdown_is_a_table_with_its_source(self):
        lines = SAMPLE.markdown().splitlines()
        assert lines[0] == "### Title"
        assert "few inputs. Published: a paper." in lines
        assert "| first | error % | 1.250 | 1.000 | +0.250 | 0.1 |" in lines
        assert any(line.startswith("| a\\|b ") for line in lines)
        assert lines[-1] == "a note"

    def test_a_missed_tolerance_is_red(self):
        cells = list(SAMPLE.rich().columns[4].cells)
        assert [str(cell.style) for cell in cells] == ["bold red", "", ""]


class TestComparison:
    def test_percent_and_cosine_of_all_pairs_together(self):
        import torch

        a, b = torch.randn(2, 50), torch.randn(2, 50)
        comparison = Comparison()
        for x, y in zip(a, b, strict=True):
            comparison.add(x, y)
        assert comparison.percent == pytest.approx(100 * float((a - b).norm() / b.norm()), rel=1e-6)
        assert comparison.cosine == pytest.approx(float(torch.cosine_similarity(a.flatten(), b.flatten(), 0)), abs=1e-6)


class TestCommand:
    def test_prints_and_writes_all_three_forms(self, run, tmp_path):
        result = run("accuracy", "--table", "proxies", "--csv", tmp_path / "t.csv", "--markdown", tmp_path / "t.md")
        assert result.exit_code == 0
        assert "Schraudolph proxies" in result.stdout
        assert len((tmp_path / "t.csv").read_text().splitlines()) == 16
        assert "| U16 / BF16 |" in (tmp_path / "t.md").read_text()

    def test_sizes_reach_the_measurement(self, run):
        result = run("accuracy", "--table", "pnq", "--seq", 256, "--heads", 1, "--seeds", 2)
        assert result.exit_code == 0
        assert "s=256, d=128, 2 seeds of 1 heads, 128 query rows of each" in result.stdout

    @pytest.mark.parametrize("arguments", [("--table", "nothing"), (), ("--table", "pnq", "--seq", 100)])
    def test_bad_arguments_are_refused(self, run, arguments):
        assert run("accuracy", *arguments).exit_code == 2

    def test_an_unknown_device_is_named(self, run):
        result = run("accuracy", "--table", "pnq", "--device", "abacus")
        assert result.exit_code == 2
        assert "--device: got 'abacus'" in result.stderr


class TestTables:
    def test_proxies(self):
        assert outside(proxies.measure(1 << 18)) == []

    def test_every_ablation_row_is_one_replace(self):
        for column in ablation.COLUMNS:
            recipes = {ablation.recipe_of(column, step) for step in ablation.STEPS}
            assert len(recipes) == len(ablation.STEPS)

    def test_ablation_of_a_small_sample_has_the_papers_order(self):
        table = ablation.measure(SMALL, ["BF16", "MXFP8"])
        error = {line.case: line.measured for line in table.lines if line.quantity == "error %"}
        assert error["BF16, + row sum of quantized P"] < error["BF16, + frozen maximum"] < 1
        assert error["BF16, + frozen maximum"] < error["BF16, + Schraudolph U16"] < error["BF16, U8 proxy"]
        assert error["MXFP8, conventional softmax"] < error["MXFP8, + Schraudolph U16"] < error["MXFP8, U8 proxy"]

    def test_pnq(self):
        table = normalization.measure(SMALL)
        assert outside(table) == []
        values = {(line.case, line.quantity): line.measured for line in table.lines}
        assert values["direct", "mean row sum"] < 0.97
        assert values["PNQ", "error % with V of mean 0.5"] < values["direct", "error % with V of mean 0.5"]

    @pytest.mark.parametrize("name", scaling.DISTRIBUTIONS)
    def test_empirical_optimum_of_the_scale_boundary(self, name):
        assert 7.0 <= scaling.empirical_optimum(scaling.samples(name, 2048)) <= 7.5

    def test_quantization_error_is_that_of_the_formats(self):
        from lowbit_attn.formats import E2M1, block_layout, round_to_blocks

        x = scaling.samples("normal", 64)
        for boundary, rule in ((7.25, "uos"), (7.0, "oas"), (6.0, "ceil")):
            expected = (round_to_blocks(x, E2M1, block_layout("mx32"), rule) - x).square().mean().item()
            assert scaling.quantization_error(x, boundary) == pytest.approx(expected, rel=1e-5)

    def test_exact_gradients_leave_their_inputs_as_they_were(self):
        import torch

        inputs = [torch.randn(1, 1, 8, 16) for _ in range(4)]
        training.exact_gradients(inputs, is_causal=True)
        assert not any(x.requires_grad for x in inputs)

    def test_training_of_a_small_sample(self):
        table = training.measure(Settings(seq=512, heads=1, seeds=1, rows=0), ["mxfp8", "nvfp4_fp8"])
        # The slack at 512 tokens, where causal rows see few keys, is wider.
        assert all(line.difference >= -0.003 for line in table.lines if line.difference is not None)


@pytest.mark.full
class TestPublished:
    """At the default size, every line within its tolerance."""

    @pytest.mark.parametrize("table", ["ablation", "uos", "pnq", "training"])
    def test_default_table(self, run, tmp_path, table):
        result = run("accuracy", "--table", table, "--csv", tmp_path / "t.csv")
        assert result.exit_code == 0
        rows = list(csv_module.DictReader((tmp_path / "t.csv").read_text().splitlines()))
        lines = [Line(row["case"], row["quantity"], float(row["measured"]), float(row["published"]), float(row["tolerance"]),
                      at_least=table == "training") for row in rows if row["tolerance"]]
        assert lines
        assert [line.cells() for line in lines if not line.holds] == []
