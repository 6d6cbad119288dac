"""`rocm-ext monitor --web`: the page of runs while they go on, its server, and its script in a browser."""

import contextlib
import gzip
import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from rocm_ext.cli import main
from tests.kit import sysfs
from tests.kit.browser import browser as browser
from tests.kit.run_folders import curve, grpo, hardware, sft, step_lines
from tests.report.test_report import figures, hostile, report, words


@contextlib.contextmanager
def serving(*arguments: object) -> Iterator[tuple[str, subprocess.Popen]]:
    """Start the command; yields the address it prints and its process."""
    command = [
        sys.executable,
        "-m",
        "rocm_ext.cli",
        "monitor",
        "--web",
        "--interval",
        "0.1",
        *map(str, arguments),
    ]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout
            line = process.stdout.readline()
            found = re.match(r"http://127\.0\.0\.1:\d+/", line)
            assert found, process.communicate(timeout=30)
            yield found[0], process
        finally:
            process.kill()


def ask(
    url: str, path: str = "", method: str = "GET", **headers: str
) -> tuple[http.client.HTTPResponse, str]:
    """Return the response to a request for a path below ``url``, and its text."""
    at = urlsplit(url)
    connection = http.client.HTTPConnection(at.hostname or "", at.port, timeout=60)
    connection.request(method, at.path + path, headers=headers)
    response = connection.getresponse()
    content = response.read()
    connection.close()
    return response, (
        gzip.decompress(content) if response.headers["Content-Encoding"] else content
    ).decode()


def wait(url: str, until: Callable[[str], Any]) -> str:
    for _ in range(300):
        text = ask(url, "page")[1]
        if until(text):
            return text
        time.sleep(0.1)
    raise AssertionError(f"not within 30 s; last: {words(text)[:3000]}")


def append(run: Path, *lines: dict[str, Any]) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """A page of a run of SFT, on a machine with 8 GPUs."""
    folder = tmp_path_factory.mktemp("site")
    run = sft(folder / "run", curve(120), finished=False)
    with serving("--port", 0, "--root", sysfs.mi300x(folder / "root"), "--run", run) as (url, _):
        yield url, run


def test_the_whole_page(site):
    url, _ = site
    response, html = ask(url)
    assert response.status == 200
    text = words(wait(url, lambda text: "GPU load" in figures(text)))
    assert "GPU 7 70 % 7.0 of 192 GiB 0.0 of 1000 GiB 147 W 47 °C 2100 MHz" in text
    assert "GPU 0, 1, 2, 3, 4, 5, 6, 7: AMD Instinct MI300X OAM" in text
    outside = re.sub("<script.*?</script>", "", html, flags=re.DOTALL)
    assert not re.findall(r"https?:|//|src=|url\(|@import", outside)
    assert len(ask(url, "page")[1]) < 300_000  # the next states come without the script


def test_no_other_path_method_name_or_address(site):
    url, _ = site
    for path in (
        "../../../etc/passwd",
        "..%2f..%2fetc%2fpasswd",
        "metrics.jsonl",
        "run/config.yaml",
    ):
        assert ask(url, path)[0].status == 404
    for method in ("POST", "PUT", "DELETE", "OPTIONS", "TRACE"):
        assert ask(url, "page", method)[0].status == 501
    for name in (
        "evil.example",
        "evil.example:8642",
        "127.0.0.1.evil.example",
        "",
        "[",
        "10.0.0.1",
    ):
        response, text = ask(url, Host=name)
        assert response.status == 403, name
        assert "Loss" not in text
    for name in ("localhost", "localhost:9000", "127.0.0.1:1", "[::1]:8642"):
        assert ask(url, Host=name)[0].status == 200, name  # another port: forwarded by ssh
    with pytest.raises(OSError):  # the server listens at the loopback address alone
        socket.create_connection(("127.0.0.2", urlsplit(url).port or 0), timeout=5)


def test_a_port_in_use(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["monitor", "--web", "--port", str(port)]) == 1
    err = capsys.readouterr().err
    assert re.fullmatch(rf"error: --port {port}: .*; name another with --port\n", err)


def test_options_that_are_wrong(capsys):
    for options, named in ((["--web", "--json"], "--json"), (["--port", "1"], "--web")):
        assert main(["monitor", *options]) == 2
        err = capsys.readouterr().err
        assert err.startswith("error: ")
        assert named in err


def test_it_ends_cleanly(tmp_path):
    with serving("--port", 0, "--log", tmp_path / "log.jsonl") as (url, process):
        port = urlsplit(url).port or 0
        with socket.create_connection(
            ("127.0.0.1", port)
        ):  # a browser's connection that stays open
            wait(url, lambda text: "Host" in text)
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 143
        assert process.stderr
        assert process.stderr.read() == ""
    assert (tmp_path / "log.jsonl").read_text().startswith('{"time": ')


def test_a_run_from_before_its_begin_to_its_end(tmp_path):
    run, whole = tmp_path / "run", sft(tmp_path / "whole", curve(8))
    with serving("--port", 0, "--run", run) as (url, _):
        assert "does not exist yet" in words(ask(url)[1])
        run.mkdir()
        wait(url, lambda text: "has written nothing yet" in text)
        shutil.copy(whole / "config.yaml", run)
        wait(url, lambda text: "Started, nothing written yet" in text)
        lines = step_lines(curve(8))
        append(run, *lines[:3])
        text = words(wait(url, lambda text: "Loss" in figures(text)))
        assert "Running , last written" in text
        assert "Steps 3" in text
        hour = float(int(time.time()) - 3600)
        for path in run.iterdir():
            os.utime(path, (hour, hour))  # as if it had been killed
        page = wait(
            url, lambda text: "Nothing new: the run has stopped, hangs or was killed" in text
        )
        assert f'data-at="{hour}"' in page
        append(run, *lines[2:])  # it was resumed, and did a step again
        assert "Running" in wait(url, lambda text: "Steps 8" in words(text))
        shutil.copy(whole / "summary.json", run)
        wait(url, lambda text: "Finished" in text)
        shutil.rmtree(run)
        wait(url, lambda text: "does not exist yet" in text)


@pytest.mark.wide
def test_in_a_browser(browser, tmp_path):
    """The page follows a run; what the reader opened and zoomed to stays."""
    width = 390
    run = hardware(
        grpo(
            tmp_path / "run",
            {0: [True, False], 6: [True, True]},
            steps=6,
            planned=40,
            finished=False,
        )
    )
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[:4]))
    page = browser.new_page(viewport={"width": width, "height": 800})
    said, asked = [], []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    with serving("--port", 0, "--run", run) as (url, process):
        page.goto(url)
        page.wait_for_function("window.Plotly")
        page.evaluate("""async () => {
          document.querySelector('details').open = true;
          window.figure = document.querySelector('section[data-key=Rewards] figure[data-key=Reward]');
          figure.scrollIntoView();
          window.plot = figure.querySelector('.plot');
        }""")
        page.wait_for_function("figure.dataset.drawn")
        box = page.locator("figure[data-key=Reward] .nsewdrag").first.bounding_box()
        page.mouse.move(box["x"] + box["width"] * 0.4, box["y"] + 50)
        page.mouse.down()
        page.mouse.move(box["x"] + box["width"] * 0.8, box["y"] + 52, steps=5)
        page.mouse.up()
        page.wait_for_function("plot.layout.xaxis.autorange === false")
        page.evaluate("window.zoomed = JSON.stringify(plot.layout.xaxis.range)")
        with (run / "metrics.jsonl").open("a") as file:
            file.writelines(lines[4:])
        page.get_by_text("6 of 40").wait_for()
        page.wait_for_function("plot.data.at(-1).x.length === 6")
        for kept in (
            "document.querySelector('details').open",
            "document.querySelector('figure[data-key=Reward] .plot') === plot && document.contains(plot)",
            "JSON.stringify(plot.layout.xaxis.range) === zoomed",
        ):
            assert page.evaluate(kept), kept
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.evaluate("document.querySelector('.state time').textContent").endswith(" s ago")
        assert page.title() == "run – live"
        assert {urlsplit(each).netloc for each in asked} == {urlsplit(url).netloc}
        assert said == []
        process.kill()
        page.get_by_text("No answer since").wait_for()
    assert "6 of 40" in page.inner_text(".card")  # what was known stays
    with serving("--port", urlsplit(url).port, "--run", run):
        page.get_by_text("Live", exact=True).wait_for()
    page.close()


def test_the_browser_runs_nothing_of_the_runs(browser, tmp_path):
    """Neither on the live page nor on a report, which asks nobody for anything."""
    run, still = hostile(tmp_path), tmp_path / "report.html"
    report(run, sft(tmp_path / "single", [1e-5], finished=False), output=still)
    with serving("--port", 0, "--run", run) as (url, _):
        for address in (url, still.as_uri()):
            page, said, asked = browser.new_page(viewport={"width": 390, "height": 800}), [], set()
            page.on("console", lambda message, said=said: said.append(message.text))
            page.on("pageerror", lambda error, said=said: said.append(str(error)))
            page.on("request", lambda request, asked=asked: asked.add(urlsplit(request.url).netloc))
            page.goto(address)
            page.wait_for_function("window.Plotly")
            page.evaluate(
                "['beforeprint', 'afterprint'].forEach(each => dispatchEvent(new Event(each)))"
            )
            assert (said, asked) == ([], {urlsplit(address).netloc})
            page.evaluate("document.querySelectorAll('details').forEach(each => each.open = true)")
            assert page.evaluate("window.pwned === undefined")
            turning = "/[\\u202a-\\u202e\\u2066-\\u2069\\u0000]/.test(document.body.innerText)"
            assert page.evaluate(turning) is False
            assert page.evaluate("document.documentElement.scrollWidth") <= 390
            page.close()
