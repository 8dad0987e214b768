"""The page of `rl report`: its numbers, what it keeps out, and that it needs nothing but itself."""

import json
import re
import shutil
import subprocess
from dataclasses import asdict
from html.parser import HTMLParser

import pytest

from rl.__main__ import main
from rl.config.compose import compose_run_config
from rl.config.flat import ABSENT
from rl.config.load import load_run_yaml, save_run_yaml
from rl.config.published import ClaimConfig, PublishedConfig, SourceConfig, Statistic
from rl.config.schema import ConfigError
from rl.loggers.samples import SAMPLES_FILE, Sample
from rl.report.charts import Phase, memory, phases, results
from rl.report.page import render
from rl.report.runs import find_runs, read_runs, settings_that_differ

HOSTILE = "</script><script>document.title='owned'</script><img src=https://example.org/x onerror=alert(1)>"
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome") or shutil.which("chromium-browser")


def rows(scale):
    start = {"step": 0, "prompts_trained": 0, "eval/sums/greedy": 0.25, "eval/sums/greedy/stderr": 0.01}
    return [start] + [
        {
            "step": step,
            "prompts_trained": 32 * step,
            "reward/mean": scale * step,
            "eval/sums/greedy": None if step % 2 else 0.25 + scale * step,
            "eval/sums/greedy/stderr": None if step % 2 else 0.02,
            "staleness/mean": 0.0,
            "memory/rss_gib": 1.0 + step / 8,
            "memory/train_gib": 2.0 + step / 8,
            "memory/gpu_forward_backward_gib": 70.0 + step,
            "time/step_s": 4.0,
            "time/train_s": 2.0,
            "time/forward_backward_s": 1.5,
            "time/wait_for_batch_s": 1.0 + step % 2,
        }
        for step in range(1, 5)
    ]


def write_run(folder, *words, scale=0.1, text="4", published=None):
    folder.mkdir(parents=True)
    config = compose_run_config(["experiment=quickstart", *words])
    config.published = published
    save_run_yaml(config, folder / "run.yaml")
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows(scale)))
    sample = Sample(3, "sums:7", 2, 8, 1, 2, 1.0, {"<b>": 0.5}, 0.25, "stop", 4, text, text, text)
    (folder / SAMPLES_FILE).write_text(json.dumps(asdict(sample)) + "\n")
    facts = {
        "time": "T",
        "command": text,
        "code": {"commit": "abc" * 9, "dirty": True},
        "packages": {"torch": "2.13.0"},
    }
    (folder / "provenance.json").write_text(json.dumps(facts))
    return folder


@pytest.fixture
def sweep(tmp_path):
    """Two points; the second one's model writes HTML."""
    write_run(tmp_path / "sweep" / "000", "seed=0")
    write_run(tmp_path / "sweep" / "001", "seed=1", "algorithm.clip_high=0.28", scale=0.05, text=HOSTILE)
    return tmp_path / "sweep"


class Page(HTMLParser):
    """Elements with their attributes, script texts, and what a person reads."""

    def __init__(self, html):
        super().__init__()
        self.elements, self.scripts, self.text, self._open = [], [], "", ""
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        self._open = tag
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag):
        self._open = ""

    def handle_data(self, data):
        if self._open == "script":
            self.scripts[-1] += data
        elif self._open != "style":
            self.text += data

    def data(self):
        return json.loads(self.scripts[0])


def report_of(folder):
    return (folder / "report.html").read_text()


def test_a_sweep_folder_gives_one_page_of_all_its_runs_with_the_numbers_of_their_files(sweep, capsys):
    assert main(["report", str(sweep)]) == 0
    assert capsys.readouterr().out == f"report of 2 runs: {sweep / 'report.html'}\n"
    data = Page(report_of(sweep)).data()
    assert [run["name"] for run in data["runs"]] == ["000", "001"]
    assert [run["varied"] for run in data["runs"]] == ["seed=0, clip_high=0.2", "seed=1, clip_high=0.28"]
    columns = data["runs"][1]["columns"]
    assert columns["reward/mean"] == [None, 0.05, 0.1, 0.15, 0.2]
    assert columns["eval/sums/greedy"] == [0.25, None, 0.35, None, 0.45]
    assert columns["eval/sums/greedy/stderr"] == [0.01, None, 0.02, None, 0.02]
    assert columns["prompts_trained"] == [0, 32, 64, 96, 128]
    assert data["sections"]["Learning"] == ["reward/mean", "eval/sums/greedy"]
    assert "eval/sums/greedy/stderr" not in data["metrics"]


def test_what_a_model_wrote_is_text_and_never_markup(sweep):
    page = Page(render(read_runs(find_runs(sweep))))
    assert page.text.count(HOSTILE) == 4, "prompt, response, expected answer, command"
    assert len(page.scripts) == 3, "the numbers, uPlot and the page's own"
    assert not [script for script in page.scripts if "owned" in script]
    assert not [tag for tag, _ in page.elements if tag in ("img", "iframe", "object", "embed", "link", "base", "form")]
    assert not [name for _, attributes in page.elements for name in attributes if name.startswith("on")]


def test_a_key_with_markup_stays_json(tmp_path):
    run = write_run(tmp_path / "run")
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 9, f"reward/part/{HOSTILE}": 0.5}) + "\n")
    page = Page(render(read_runs([run])))
    assert len(page.scripts) == 3
    assert f"reward/part/{HOSTILE}" in page.data()["metrics"]


def test_nothing_is_loaded_from_anywhere(sweep):
    html = render(read_runs(find_runs(sweep)))
    loading = ("src", "srcset", "href", "data", "poster", "action", "background", "ping", "manifest")
    assert not [(tag, a) for tag, a in Page(html).elements if tag != "a" for name in a if name in loading]
    styles = "".join(re.findall(r"<style>(.*?)</style>", html, re.DOTALL))
    assert styles and not re.search(r"url\(|@import", styles)
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', html)
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe-eval" not in policy and "http" not in policy


def test_the_licence_of_the_library_is_in_the_page(sweep):
    assert "Copyright (c) 2022 Leon Sorokin" in Page(render(read_runs(find_runs(sweep)))).text


def test_published_claims_are_lines_and_only_a_web_address_is_a_link(tmp_path):
    claims = {
        "peak": ClaimConfig(metric="eval/sums/greedy", value=0.9),
        "faster": ClaimConfig(metric="time/step_s", statistic=Statistic.ratio, value=1.8, versus="other"),
    }
    pages = []
    for name, url in (("a", "https://example.org/paper"), ("b", "javascript:alert(1)")):
        source = SourceConfig(title="A paper", url=url)
        run = write_run(tmp_path / name, published=PublishedConfig(source=source, claims=claims))
        pages.append(Page(render(read_runs([run]))))
    assert [without_window(line) for line in pages[0].data()["lines"]] == [
        {"metric": "eval/sums/greedy", "label": "published/peak", "value": 0.9}
    ]
    links = [[attributes["href"] for tag, attributes in page.elements if tag == "a"] for page in pages]
    assert links == [["https://example.org/paper"], []]


def without_window(line):
    return {name: value for name, value in line.items() if name != "window"}


def test_a_claim_s_line_has_its_window_along_each_axis_once_a_run_has_come_to_it(tmp_path):
    metric = "eval/sums/greedy"
    claims = {
        "start": ClaimConfig(metric=metric, statistic=Statistic.start, value=0.2),
        "middle": ClaimConfig(metric=metric, value=0.5, first_step=2, last_step=3),
        "end": ClaimConfig(metric=metric, value=0.7, first_step=4, last_step=99),
        "later": ClaimConfig(metric=metric, value=0.9, first_step=5),
    }
    page = Page(render(read_runs([write_run(tmp_path / "run", published=PublishedConfig(claims=claims))])))
    windows = {line["label"]: line["window"] for line in page.data()["lines"]}
    assert windows == {
        "published/start": {"step": [0, 0], "prompts_trained": [0, 0], "tokens_trained": [0, 0]},
        "published/middle": {"step": [2, 3], "prompts_trained": [64, 96], "tokens_trained": [0, 0]},
        "published/end": {"step": [4, 4], "prompts_trained": [128, 128], "tokens_trained": [0, 0]},
    }
    assert "5 to the last" in page.text, "in the table it stands from the beginning"


def test_what_the_plan_predicted_is_a_line_of_its_metric_once_where_runs_agree(tmp_path):
    runs = [write_run(tmp_path / name) for name in ("a", "b", "c")]
    for run, seconds in zip(runs, (3.0, 3.0, 5.0), strict=True):
        with (run / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": 9, "plan/time/step_s": seconds}) + "\n")
    data = Page(render(read_runs(runs))).data()
    assert [without_window(line) for line in data["lines"]] == [
        {"metric": "time/step_s", "label": "plan (a, b)", "value": 3.0},
        {"metric": "time/step_s", "label": "plan (c)", "value": 5.0},
    ]
    assert "plan/time/step_s" not in data["metrics"]


def test_settings_commit_and_packages_that_differ_are_named_with_their_values(sweep):
    runs = read_runs(find_runs(sweep))
    assert settings_that_differ(runs) == {"seed": (0, 1), "algorithm.clip_high": (0.2, 0.28)}
    facts = json.loads((sweep / "001" / "provenance.json").read_text())
    facts["packages"] = {"torch": "2.12.0", "vllm": "0.32.0"}
    (sweep / "001" / "provenance.json").write_text(json.dumps(facts))
    found = settings_that_differ(read_runs(find_runs(sweep)))
    assert found["packages.torch"] == ("2.13.0", "2.12.0")
    assert found["packages.vllm"] == (ABSENT, "0.32.0")


def test_phases_are_means_over_timed_steps_with_their_peaks_and_parts_of_training_follow_it(tmp_path):
    (run,) = read_runs([write_run(tmp_path / "run")])
    assert phases(run) == [
        Phase("train", 2.0, 0.5, is_part=False, resident_gib=2.5, gpu_gib=None),
        Phase("forward_backward", 1.5, 0.375, is_part=True, resident_gib=None, gpu_gib=74.0),
        Phase("wait_for_batch", 1.5, 0.375, is_part=False, resident_gib=None, gpu_gib=None),
    ]
    assert memory(run) == {"memory/rss_gib": 1.5}
    assert run.seconds == 16.0


def test_results_are_first_last_and_best_with_the_last_error(tmp_path):
    (run,) = read_runs([write_run(tmp_path / "run", scale=0.1)])
    (found,) = results([run])["eval/sums/greedy"]
    assert found == {"first": 0.25, "last": 0.65, "best": 0.65, "best_step": 4, "stderr": 0.02}


def test_an_older_report_is_replaced_and_no_other_file_is(tmp_path, capsys):
    run = write_run(tmp_path / "run")
    assert main(["report", str(run)]) == main(["report", str(run)]) == 0
    notes = tmp_path / "notes.html"
    notes.write_text("mine")
    assert main(["report", str(run), f"output={notes}"]) == 2
    assert "is no report of this command" in capsys.readouterr().err
    assert notes.read_text() == "mine"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "write: rl report"),
        (["--open"], "write: rl report"),
        (["nowhere"], "holds no run"),
        (["run", "output=nowhere/a.html"], "there is no folder"),
        (["empty"], "nothing to report"),
    ],
)
def test_a_wrong_command_is_refused(tmp_path, monkeypatch, capsys, words, said):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "run")
    (write_run(tmp_path / "empty") / "metrics.jsonl").unlink()
    assert main(["report", *words]) == 2
    assert said in capsys.readouterr().err


def test_a_run_without_samples_provenance_and_timed_steps_has_a_page(tmp_path):
    run = write_run(tmp_path / "run")
    for name in (SAMPLES_FILE, "provenance.json"):
        (run / name).unlink()
    (run / "metrics.jsonl").write_text('{"step": 0, "eval/sums/greedy": 0.5}\n')
    assert "This run has no samples.jsonl" in Page(render(read_runs([run]))).text


def test_a_folder_whose_config_cannot_be_read_is_named(tmp_path):
    run = write_run(tmp_path / "run")
    assert load_run_yaml(run / "run.yaml").seed == 0
    (run / "run.yaml").write_text("- not\n- a config\n")
    with pytest.raises(ConfigError, match=r"run\.yaml is not a run's config"):
        read_runs([run])


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium, on Debian: apt-get install chromium")
def test_a_browser_without_network_draws_the_page_says_nothing_and_asks_for_nothing(sweep, tmp_path):
    (write_run(sweep / "002", "seed=2") / "metrics.jsonl").unlink()  # has not started yet
    assert main(["report", str(sweep)]) == 0
    command = [
        CHROMIUM,
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--host-resolver-rules=MAP * ~NOTFOUND",
        "--enable-logging=stderr",
        f"--user-data-dir={tmp_path / 'profile'}",
        f"--log-net-log={tmp_path / 'net.json'}",
        "--virtual-time-budget=5000",
        "--window-size=1400,900",
        f"--screenshot={tmp_path / 'page.png'}",
        "--dump-dom",
        (sweep / "report.html").as_uri(),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert not [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    assert done.stdout.count("<canvas") == len(Page(report_of(sweep)).data()["sections"]["Learning"]) + 3
    assert "no row yet" in done.stdout
    assert "owned" not in re.findall(r"<title>(.*?)</title>", done.stdout)
    net = (tmp_path / "net.json").read_text()
    assert "report.html" in net
    assert "example.org" not in net
    assert (tmp_path / "page.png").stat().st_size > 20_000
