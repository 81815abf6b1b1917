"""Tables and figures against numpy by hand, from records written by the store."""

import subprocess
import sys

import numpy as np
import pandas as pd
import pytest
import records
from matplotlib.figure import Figure
from rich.console import Console

from analysis import figures, report, tables
from fedscale import store

EPSILONS = (0.001, 0.01, 0.1, 1.0)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    root = tmp_path_factory.mktemp("results")
    truth = records.write_sweep(root, epsilons=EPSILONS)
    return root, truth


@pytest.fixture(scope="module")
def rounds(written):
    return store.load(written[0] / "eps")


def shown(table, title=""):
    console = Console(width=160, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(tables.render(table, title))
    return console.export_text()


def legend(figure):
    return [text.get_text() for text in figure.legends[0].get_texts()]


def line(axes, label):
    """The (x, y) of the errorbar or line with a label that starts so."""
    for container in axes.containers:
        if container.get_label().startswith(label):
            return [np.asarray(values, float) for values in container.lines[0].get_data()]
    for drawn in axes.lines:
        if drawn.get_label().startswith(label):
            return [np.asarray(values, float) for values in drawn.get_data()]
    raise AssertionError(f"no line {label!r}")


# Tables


def test_statistics_over_seeds_are_numpy_s(written, rounds):
    _, truth = written
    table = tables.sweep_table(rounds, "merge.epsilon")
    assert list(table["merge.epsilon"][:4]) == list(EPSILONS)
    assert list(table["name"]) == ["dfrost"] * 4 + [records.LABEL]
    assert list(table["reference"]) == [False] * 4 + [True]
    assert np.isnan(table["merge.epsilon"][4])
    for row, key in zip(table.to_dict("records"), [*EPSILONS, records.LABEL], strict=True):
        accuracy, error = np.array([truth[key, seed] for seed in (0, 1, 2)]).T
        assert row["runs"] == 3
        assert row["accuracy"] == pytest.approx(accuracy.mean())
        assert row["accuracy_std"] == pytest.approx(accuracy.std(ddof=1))
        assert row["consensus_error"] == pytest.approx(error.mean())
        assert row["consensus_error_std"] == pytest.approx(error.std(ddof=1))
        assert row["merge_seconds"] == pytest.approx(0.01 * np.mean([1, 2, 3, 4, 5, 6]))
        assert row["bytes_sent"] == 1000
        assert row["running"] == row["diverged"] == row["failed"] == 0


def test_runs_not_completed_are_counted_not_averaged(tmp_path):
    for seed, status, upto in ((0, "completed", 6), (1, "diverged", 4), (2, "failed", 0)):
        config = records.config(seed, epsilon=0.1)
        records.write(tmp_path, "s", config, status=status, upto=upto, accuracy=0.6)
    records.write(tmp_path, "s", records.config(0, epsilon=9.0), status="diverged", upto=2)
    rounds, runs = store.load(tmp_path / "s"), store.load(tmp_path / "s", "runs")
    table = tables.sweep_table(rounds, runs=runs)
    counts = table[["merge.epsilon", "runs", "running", "diverged", "failed"]]
    assert counts.to_numpy().tolist() == [[0.1, 1, 0, 1, 1], [9.0, 0, 0, 1, 0]]
    assert table["accuracy"][0] == pytest.approx(0.6) and np.isnan(table["accuracy_std"][0])
    assert np.isnan(table["accuracy"][1])
    assert "1 diverged, 1 failed" in shown(table) and "60.0" in shown(table)
    without = tables.sweep_table(rounds)
    assert list(without["failed"]) == [0, 0] and list(without["diverged"]) == [1, 1]
    note = figures.sweep_curve(rounds, "merge.epsilon", runs=runs).axes[0].get_title(loc="left")
    assert "1 diverged, 1 failed (dfrost, merge.epsilon=0.1)" in note
    assert "1 diverged (dfrost, merge.epsilon=9)" in note


def test_the_last_measured_round_counts(tmp_path):
    config = records.config(rounds=3)
    store.write_run(tmp_path, "s", records.run_record(config))
    rows = [
        records.round_row(1, 0.1, 1.0),
        records.round_row(2, 0.2, 2.0),
        records.round_row(3, active_clients=0, bytes_sent=0),
    ]
    store.write_rounds(tmp_path, "s", records.run_id(config), "rounds", 1, 3, rows)
    final = tables.final_rounds(store.load(tmp_path / "s"))
    assert list(final["round"]) == [2] and list(final["accuracy_mean"]) == [0.2]
    assert list(final["bytes_sent"]) == [1000]


def test_completed_without_a_measurement_is_an_error(tmp_path):
    config = records.config(rounds=1)
    store.write_run(tmp_path, "s", records.run_record(config))
    row = [records.round_row(1)]
    store.write_rounds(tmp_path, "s", records.run_id(config), "rounds", 1, 1, row)
    with pytest.raises(ValueError, match="completed but never measured: dfrost-s0-"):
        tables.sweep_table(store.load(tmp_path / "s"))


@pytest.fixture(scope="module")
def grid(tmp_path_factory):
    """λ × graph, two seeds, accuracy = a number that tells the cell."""
    root = tmp_path_factory.mktemp("grid")
    for g, graph in enumerate(("ring", "complete")):
        for i, lam in enumerate((0.0, 0.01, 1.0)):
            for seed in (0, 1):
                config = records.config(seed, lam=lam, graph=graph)
                records.write(root, "g", config, accuracy=0.1 * (i + 1) + 0.05 * g + 0.01 * seed)
        for seed in (0, 1):
            config = records.config(seed, method="davg_adam_pt", graph=graph)
            records.write(root, "g", config, label=records.LABEL, accuracy=0.5 + 0.1 * g)
    return store.load(root / "g")


def test_two_keys_are_never_averaged_into_one(grid):
    for keys in (["merge.lam", "graph.name"], "merge.lam"):
        table = tables.sweep_table(grid, keys)
        assert list(table.columns[2:5]) == ["merge.lam", "graph.name", "runs"]
        assert list(table["runs"]) == [2] * 8
        swept = table[~table["reference"]].set_index(["merge.lam", "graph.name"])["accuracy"]
        assert swept[0.01, "complete"] == pytest.approx(0.255)
        assert swept[1.0, "ring"] == pytest.approx(0.305)
        references = table[table["reference"]]
        assert references["merge.lam"].isna().all()
        assert list(references["graph.name"]) == ["complete", "ring"]
        assert list(references["accuracy"]) == pytest.approx([0.6, 0.5])
    assert tables.varying_keys(grid) == ["graph.name", "merge.lam"]


def test_tables_name_unknown_keys(rounds):
    with pytest.raises(ValueError, match=r"'epsilon': no such column .* merge.epsilon\?"):
        tables.sweep_table(rounds, "epsilon")


def test_describe_says_what_the_runs_share(rounds, grid):
    assert tables.describe(rounds) == "dfrost · offline (extreme) · 4 clients · 6 rounds · 3 seeds"
    dirichlet = rounds.assign(**{"data.partition": "dirichlet", "data.alpha": 0.1, "seed": 0})
    assert "offline (dirichlet 0.1)" in tables.describe(dirichlet)
    assert tables.describe(dirichlet).endswith("1 seed")


def test_render_has_percent_bytes_and_the_best_row(written, rounds):
    table = tables.sweep_table(rounds)
    text = shown(table, "title")
    best = table.loc[table["accuracy"].idxmax()]
    assert f"{100 * best['accuracy']:.1f} ± {100 * best['accuracy_std']:.1f}" in text
    assert "1.0 kB" in text and "0.0350" in text and "not completed" not in text
    assert [line for line in text.splitlines() if line.startswith(f"│ {records.LABEL}")]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (0.000123456, "0.000123"),
        (1.5e-5, "1.50e-05"),
        (0.9996, "1.000"),
        (123.4, "123"),
    ],
)
def test_numbers_have_three_digits(value, text):
    assert tables._number(value) == text


# Figures


def test_the_curve_s_data_are_the_table_s(written, rounds):
    table = tables.sweep_table(rounds)
    swept, reference = table[~table["reference"]], table[table["reference"]].iloc[0]
    figure = figures.epsilon_curve(rounds)
    assert isinstance(figure, Figure) and len(figure.axes) == 2
    for axes, column, unit in zip(
        figure.axes, ("accuracy", "consensus_error"), (100, 1), strict=True
    ):
        x, y = line(axes, "dfrost")
        np.testing.assert_allclose(x, swept["merge.epsilon"])
        np.testing.assert_allclose(y, unit * swept[column])
        bars = axes.containers[0].lines[2][0].get_segments()
        heights = [segment[1][1] - segment[0][1] for segment in bars]
        np.testing.assert_allclose(heights, 2 * unit * swept[f"{column}_std"])
        _, level = line(axes, records.LABEL)
        np.testing.assert_allclose(level, unit * reference[column])
        band = axes.patches[0]
        assert band.get_y() == pytest.approx(
            unit * (reference[column] - reference[f"{column}_std"])
        )
        assert band.get_height() == pytest.approx(2 * unit * reference[f"{column}_std"])
        dots = [drawn for drawn in axes.lines if drawn.get_alpha() == 0.4]
        finals = tables.final_rounds(rounds)
        finals = finals[finals["label"] == ""]
        measure = "accuracy_mean" if column == "accuracy" else column
        np.testing.assert_allclose(dots[0].get_xdata(), finals["merge.epsilon"])
        np.testing.assert_allclose(dots[0].get_ydata(), unit * finals[measure])
        assert axes.get_xscale() == "log" and axes.get_ylabel() and axes.get_xlabel()
    assert legend(figure) == [f"{records.LABEL} (3 runs)", "dfrost (3 runs)"]
    assert figure.get_suptitle() == tables.describe(rounds)


def test_a_narrow_span_is_linear_and_a_zero_is_shown(grid, rounds):
    narrow = rounds[rounds["merge.epsilon"].isin([0.01, 0.1]) & (rounds["label"] == "")]
    assert figures.epsilon_curve(narrow).axes[0].get_xscale() == "linear"
    assert figures.sweep_curve(grid, "merge.lam").axes[0].get_xscale() == "symlog"


def test_a_wide_consensus_error_is_logarithmic(rounds):
    wide = rounds.assign(consensus_error=rounds["consensus_error"] * rounds["merge.epsilon"])
    assert figures.epsilon_curve(wide).axes[1].get_yscale() == "log"
    assert figures.epsilon_curve(rounds).axes[1].get_yscale() == "linear"


def test_another_key_gives_another_line(grid):
    axes = figures.sweep_curve(grid, "merge.lam").axes[0]
    np.testing.assert_allclose(line(axes, "dfrost, graph.name=ring")[1], [10.5, 20.5, 30.5])
    np.testing.assert_allclose(line(axes, "dfrost, graph.name=complete")[1], [15.5, 25.5, 35.5])
    assert line(axes, f"{records.LABEL}, graph.name=ring")[1][0] == pytest.approx(50)


def test_names_on_the_horizontal_axis(grid):
    axes = figures.sweep_curve(grid, "graph.name").axes[0]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["complete", "ring"]
    x, y = line(axes, "dfrost, merge.lam=0.01")
    assert [round(place) for place in x] == [0, 1]  # lines of several groups stand apart
    np.testing.assert_allclose(y, [25.5, 20.5])
    np.testing.assert_allclose(line(axes, records.LABEL)[1], [60, 50])


def test_rounds_curve_is_the_mean_over_seeds(written, rounds):
    _, truth = written
    axes = figures.rounds_curve(rounds).axes[0]
    for key, label in [*((e, f"merge.epsilon={e:g}") for e in EPSILONS), (records.LABEL,) * 2]:
        x, y = line(axes, label)
        final = 100 * np.mean([truth[key, seed][0] for seed in (0, 1, 2)])
        assert list(x) == [2, 4, 6]
        np.testing.assert_allclose(y, final * np.array([1, 2, 3]) / 3)


def test_one_run_and_only_references_can_be_drawn(rounds):
    one = rounds[(rounds["seed"] == 0) & (rounds["merge.epsilon"] == 0.1)]
    assert legend(figures.epsilon_curve(one)) == ["dfrost (1 run)"]
    assert legend(figures.rounds_curve(one, ())) == ["dfrost (1 run)"]
    references = rounds[rounds["label"] != ""]
    assert legend(figures.epsilon_curve(references)) == [f"{records.LABEL} (3 runs)"]
    with pytest.raises(ValueError, match="no completed run in the records"):
        figures.epsilon_curve(rounds.assign(status="running"))


def test_saved_files_are_equal_for_equal_records(tmp_path, rounds):
    def save(name):
        (tmp_path / name).mkdir()
        drawn = [figures.epsilon_curve(rounds), figures.rounds_curve(rounds)]
        paths = [
            path for i, f in enumerate(drawn) for path in figures.save(f, f"{tmp_path}/{name}/{i}")
        ]
        return [open(path, "rb").read() for path in paths]

    first = save("a")
    assert first == save("b")
    assert len(first) == 4 and first[0].startswith(b"\x89PNG") and b"<svg" in first[1]
    assert int.from_bytes(first[0][16:20], "big") == 1200


def test_figures_are_saved_to_uris(rounds):
    stem = "fsspec+memory://figures/a b/eps"
    written = figures.save(figures.epsilon_curve(rounds), stem)
    assert written == [f"{stem}.png", f"{stem}.svg"]


# Report


def test_report_writes_what_it_says(tmp_path, capsys):
    records.write_sweep(tmp_path, seeds=(0, 1))
    written = report.compare_report("merge.epsilon")(str(tmp_path), "eps")
    names = ["eps.csv", "eps.png", "eps.svg", "eps_rounds.png", "eps_rounds.svg"]
    assert written == [f"{tmp_path}/figures/{name}" for name in names]
    assert sorted(p.name for p in (tmp_path / "figures").iterdir()) == names
    assert "eps: dfrost · offline" in capsys.readouterr().out
    table = tables.sweep_table(store.load(tmp_path / "eps"))
    saved = pd.read_csv(written[0])
    pd.testing.assert_frame_equal(saved, table, check_dtype=False, rtol=1e-5)
    assert store.sweeps(tmp_path) == ["eps"]


def test_report_finds_sweeps_and_keys(tmp_path, capsys):
    records.write(tmp_path, "one", records.config(lam=0.1))
    records.write(tmp_path, "one", records.config(lam=0.2))
    records.write(tmp_path, "two", records.config(), status="running", upto=2)
    assert report.main([str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "merge.lam" in out and "no run is completed yet: no figure" in out
    assert (tmp_path / "figures" / "one.png").exists()
    assert not (tmp_path / "figures" / "two.png").exists()


@pytest.mark.parametrize("arguments", [["nowhere"], ["."], [".", "--sweep", "x"]])
def test_report_errors_are_one_line(tmp_path, monkeypatch, capsys, arguments):
    monkeypatch.chdir(tmp_path)
    assert report.main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1


def test_a_notebook_shows_a_figure_that_pyplot_did_not_make(rounds, monkeypatch):
    """Stand-in for IPython: a shell with a formatter that knows no matplotlib figures yet."""

    class Formatter:
        def __init__(self):
            self.type_printers = {}

        def for_type(self, kind, function):
            self.type_printers[kind] = function

    formatter = Formatter()

    class Shell:
        class display_formatter:  # noqa: N801
            formatters = {"image/png": formatter}  # noqa: RUF012

    class IPython:
        @staticmethod
        def get_ipython():
            return Shell

    monkeypatch.setitem(sys.modules, "IPython", IPython)
    figure = figures.epsilon_curve(rounds)
    assert formatter.type_printers[Figure](figure).startswith(b"\x89PNG")


def test_three_lines_without_a_display(written):
    code = f"""
import fedscale
from analysis.figures import epsilon_curve
figure = epsilon_curve(fedscale.load({str(written[0] / "eps")!r}))
import sys
print(type(figure).__name__, [m for m in ("torch", "ray", "matplotlib.pyplot") if m in sys.modules])
"""
    done = subprocess.run([sys.executable, "-B", "-c", code], capture_output=True, text=True)
    assert done.stdout == "Figure []\n", done.stderr
