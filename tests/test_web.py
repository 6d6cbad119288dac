"""`rocm-ext monitor --web`: the page of runs while they go on, its server, and its script in a browser."""

import contextlib
import gzip
import http.client
import itertools
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from base64 import b64encode
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest

from rocm_ext.cli import main
from rocm_ext.report import server
from rocm_ext.report.live import LivePage
from rocm_ext.report.server import PORT, PageServer
from tests import sysfs
from tests.browser import browser as browser
from tests.run_folders import curve, grpo, raft, sft, step_lines
from tests.test_live import hardware
from tests.test_report import NASTY, OVERLAPS, figures, hostile, words


@contextlib.contextmanager
def serving(*arguments: object) -> Iterator[tuple[str, subprocess.Popen]]:
    """Start the command; yields the address it prints and its process."""
    command = [sys.executable, "-m", "rocm_ext.cli", "monitor", "--web", "--interval", "0.1", *map(str, arguments)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout
            line = process.stdout.readline()
            found = re.match(r"http://\S+/", line)
            assert found, process.communicate(timeout=30)
            yield found[0], process
        finally:
            process.kill()


def ask(url: str, path: str = "", method: str = "GET", **headers: str) -> tuple[http.client.HTTPResponse, str]:
    """Return the response to a request for a path below ``url``, and its text."""
    at = urlsplit(url)
    connection = http.client.HTTPConnection(at.hostname or "", at.port, timeout=60)
    connection.request(method, at.path + path, headers=headers)
    response = connection.getresponse()
    content = response.read()
    connection.close()
    return response, (gzip.decompress(content) if response.headers["Content-Encoding"] else content).decode()


def wait(url: str, until: Callable[[str], Any], path: str = "page") -> str:
    """Ask for the page until it is as wanted."""
    for _ in range(300):
        text = ask(url, path)[1]
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


# ---- the server


def test_the_whole_page(site):
    url, _ = site
    response, html = ask(url)
    assert urlsplit(url).hostname == "127.0.0.1"
    assert response.status == 200
    assert figures(html)[-5:] == ["Loss", "Learning rate", "Gradient norm", "Speed", "Peak memory"]
    wait(url, lambda text: "GPU load" in figures(text), "machine")
    text = words(ask(url)[1])
    assert "GPU 7 70 % 7.0 of 192 0.0 of 1000 147 47 2100" in text
    assert "GPU 0, 1, 2, 3, 4, 5, 6, 7: AMD Instinct MI300X OAM" in text
    outside = re.sub("<script>.*?</script>", "", html, flags=re.DOTALL)
    assert not re.findall(r"https?:|//|src=|url\(|@import", outside)
    policy = response.headers["Content-Security-Policy"]
    for kind in ("script", "style"):
        (inline,) = re.findall(f"<{kind}>(.*?)</{kind}>", html, re.DOTALL)
        assert f"{kind}-src 'sha256-{b64encode(sha256(inline.encode()).digest()).decode()}';" in policy
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy


def test_an_unchanged_page_is_not_sent_again(site):
    url, _ = site
    first, html = ask(url, "page")
    again, nothing = ask(url, "page", **{"If-None-Match": first.headers["ETag"]})
    assert (again.status, nothing, again.headers["ETag"]) == (304, "", first.headers["ETag"])
    assert ask(url, "page", **{"If-None-Match": '"other"'})[0].status == 200
    packed, same = ask(url, "page", **{"Accept-Encoding": "gzip"})
    assert same == html
    assert int(packed.headers["Content-Length"]) < len(html) / 3
    head, nothing = ask(url, "page", "HEAD")
    assert (head.status, nothing, int(head.headers["Content-Length"])) == (200, "", len(html))


@pytest.mark.parametrize(
    "path",
    ["../../../etc/passwd", "..%2f..%2fetc%2fpasswd", "metrics.jsonl", "run/config.yaml", "/etc/passwd", "pagex"],
)
def test_no_other_path(site, path):
    assert ask(site[0], path)[0].status == 404


def test_no_other_method(site):
    for method in ("POST", "PUT", "DELETE", "OPTIONS", "TRACE"):
        assert ask(site[0], "page", method)[0].status == 501


@pytest.mark.parametrize("name", ["evil.example", "evil.example:8642", "127.0.0.1.evil.example", "", "[", "10.0.0.1"])
def test_no_other_name_of_the_host(site, name):
    response, text = ask(site[0], Host=name)
    assert response.status == 403
    assert "<svg" not in text


@pytest.mark.parametrize("name", ["localhost", "localhost:9000", "127.0.0.1:1", "[::1]:8642"])
def test_names_of_the_loopback_address(site, name):
    assert ask(site[0], Host=name)[0].status == 200  # another port: forwarded by ssh


def test_with_host_the_address_has_a_token():
    with (
        serving("--host", "127.0.0.1", "--port", 0) as (url, _),
        serving("--host", "localhost", "--port", 0) as (other, _),
    ):
        token = urlsplit(url).path.strip("/")
        assert len(token) >= 32
        assert token != urlsplit(other).path.strip("/")
        assert ask(url)[0].status == ask(url, "page")[0].status == 200
        assert ask(url, Host="strix.lan:8642")[0].status == 200
        assert ask(url)[0].headers["Referrer-Policy"] == "no-referrer"
        top = url.replace(token + "/", "")
        for path in (
            "",
            "page",
            "machine",
            token,
            token[:-1] + "/",
            f"{'A' * len(token)}/",
            f"{'A' * len(token)}/page",
            "%c3%a9/",
        ):
            assert ask(top, path)[0].status == 404, path


@contextlib.contextmanager
def served(monkeypatch, **settings) -> Iterator[PageServer]:
    """A server in this process, with other values for the constants of its module."""
    for name, value in settings.items():
        monkeypatch.setattr(server, name, value)
    with PageServer(LivePage([], 1.0), "127.0.0.1", 0) as site:
        thread = threading.Thread(target=site.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield site
        site.shutdown()


def connect(site: PageServer) -> socket.socket:
    return socket.create_connection(site.server_address[:2], timeout=20)


def test_silent_connections_are_few_and_short(monkeypatch):
    with served(monkeypatch, _CONNECTIONS=4, _FIRST=1000.0) as site, contextlib.ExitStack() as stack:
        silent = [stack.enter_context(connect(site)) for _ in range(10)]
        assert [peer.recv(1) for peer in silent[4:]] == [b""] * 6  # at once
        assert len(site.ends) == 4
        site.ends.update(dict.fromkeys(site.ends, 0.0))
        assert [peer.recv(1) for peer in silent[:4]] == [b""] * 4
        while site.ends:
            time.sleep(0.01)
        assert ask(site.url)[0].status == 200


def test_a_request_that_comes_byte_by_byte_has_a_deadline(monkeypatch):
    with served(monkeypatch, _FIRST=0.5, _NEXT=0.5) as site, connect(site) as peer:
        began = time.monotonic()
        with contextlib.suppress(ConnectionError):
            for letter in itertools.cycle(b"GET / HTTP/1.1\r\nA"):
                peer.send(bytes([letter]))
                time.sleep(0.05)
                assert time.monotonic() - began < 15


def test_a_stranger_without_the_token_is_not_kept(monkeypatch):
    with served(monkeypatch) as site, connect(site) as peer:
        peer.sendall(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
        answer = b"".join(iter(lambda: peer.recv(65536), b""))  # to the end of the connection
        assert answer.startswith(b"HTTP/1.1 404")


def test_without_descriptors_it_waits(tmp_path):
    """80 silent connections to a process that may have 64 files."""
    program = "import resource, sys; from rocm_ext.cli import main; " \
        "resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64)); sys.exit(main(sys.argv[1:]))"  # fmt: skip
    command = [sys.executable, "-c", program, "monitor", "--web", "--host", "127.0.0.1", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process, contextlib.ExitStack() as stack:
        stack.callback(process.kill)
        assert process.stdout
        url = process.stdout.readline().split()[0]
        place = urlsplit(url).hostname, urlsplit(url).port
        silent = [stack.enter_context(socket.create_connection(place)) for _ in range(80)]
        watched = psutil.Process(process.pid)
        time.sleep(0.5)
        assert watched.num_threads() < 45
        before = watched.cpu_times()
        time.sleep(1)
        assert sum(watched.cpu_times()[:2]) - sum(before[:2]) < 0.5
        for peer in silent:
            peer.close()
        assert wait(url, lambda text: "Host" in text, "machine")


def test_a_page_is_drawn_and_compressed_once(monkeypatch):
    packed = []
    original = gzip.compress
    monkeypatch.setattr(server.gzip, "compress", lambda *args: packed.append(1) or original(*args))
    with served(monkeypatch) as site:
        site.page.take({"gpus": [], "host": {"cpu": 5.0}, "time": time.time()})
        drawn = []
        monkeypatch.setattr(site.page, "_draw_machine", lambda readings: drawn.append(1) or "the machine")
        for _ in range(5):
            assert "the machine" in ask(site.url, **{"Accept-Encoding": "gzip"})[1]
        assert (len(drawn), len(packed)) == (1, 1)
        site.page.take({"gpus": [], "host": {"cpu": 6.0}, "time": time.time()})
        ask(site.url, "machine")
        assert len(drawn) == 2


# ---- options


def test_a_port_in_use(tmp_path, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["monitor", "--web", "--port", str(port)]) == 1
    err = capsys.readouterr().err
    assert re.fullmatch(rf"error: --port {port} of 127\.0\.0\.1: .*; name another with --port\n", err)


def test_without_a_port_a_free_one(capsys):
    with pytest.raises(SystemExit):
        main(["monitor", "--help"])
    assert f"(default: {PORT}, or a free one)" in " ".join(capsys.readouterr().out.split())
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # something else has it
            stack.enter_context(socket.create_server(("127.0.0.1", PORT)))
        url, _ = stack.enter_context(serving())
        assert urlsplit(url).port not in (None, 0, PORT)
        assert ask(url)[0].status == 200


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--web", "--json"], "--json"),
        (["--port", "1"], "--web"),
        (["--host", "0.0.0.0"], "--web"),
        (["--run", "a", "b"], "--web"),
        (["--web", "--host", "192.0.2.77"], "--host 192.0.2.77"),
        (["--web", "--host", "no such host"], "--host no such host"),
    ],
)
def test_options_that_are_wrong(capsys, options, named):
    assert main(["monitor", *options]) in (1, 2)
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert named in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 0), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow)]
)
def test_it_ends_cleanly(tmp_path, number, code):
    with serving("--port", 0, "--log", tmp_path / "log.jsonl") as (url, process):
        connection = http.client.HTTPConnection("127.0.0.1", urlsplit(url).port, timeout=60)
        connection.request("GET", "/page")  # a browser's connection that stays open
        connection.getresponse().read()
        wait(url, lambda text: "Host" in text, "machine")
        process.send_signal(number)
        assert process.wait(30) == code
        assert process.stderr
        assert process.stderr.read() == ""
        connection.close()
    assert (tmp_path / "log.jsonl").read_text().startswith('{"time": ')


# ---- runs


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
        hour = time.time() - 3600
        for path in run.iterdir():
            os.utime(path, (hour, hour))  # as if it had been killed
        page = wait(url, lambda text: "Nothing new: the run has stopped, hangs or was killed" in text)
        assert f'data-at="{hour:.1f}'[:-2] in page
        append(run, *lines[2:])  # it was resumed, and did a step again
        assert "Running" in wait(url, lambda text: "Steps 8" in words(text))
        shutil.copy(whole / "summary.json", run)
        wait(url, lambda text: "Finished" in text)
        shutil.rmtree(run)
        wait(url, lambda text: "does not exist yet" in text)


def test_several_runs_one_of_them_to_come(tmp_path):
    folders = [raft(tmp_path / "a", [[True, False]] * 2), grpo(tmp_path / "b", {0: [True]}, steps=3), tmp_path / "c"]
    html = LivePage(folders, interval=1).whole()
    text = words(html)
    assert "2 runs" in text
    assert text.count("Finished") == 2
    assert f"Waiting for {tmp_path / 'c'}." in text
    assert {"Held-out pass@1", "Reward", "Loss"} <= set(figures(html))


def test_hostile_text_is_only_text(tmp_path):
    html = LivePage([hostile(tmp_path)], interval=1).whole()
    assert html.count("<script") == 1
    assert "<img" not in html
    assert NASTY[:20] not in html


# ---- in a browser


@pytest.mark.parametrize("width", [360, pytest.param(1280, marks=pytest.mark.slow)])
def test_in_a_browser(browser, tmp_path, width):
    """The page follows a run; what the reader opened, scrolled to and points at stays."""
    run = hardware(grpo(tmp_path / "run", {0: [True, False], 6: [True, True]}, steps=6, planned=40, finished=False))
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[:4]))
    page = browser.new_page(viewport={"width": width, "height": 800})
    said, asked = [], []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    with serving("--port", 0, "--run", run) as (url, process):
        page.goto(url)
        page.get_by_text("Live", exact=True).wait_for()
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.evaluate(OVERLAPS) == []
        page.evaluate("""() => {
          document.querySelector('details').open = true;
          window.column = document.querySelector('figure[data-key="Reward"] .over');
          window.chart = column.closest('svg');
          window.before = chart.querySelector('path').getAttribute('d');
          chart.scrollIntoView();
        }""")
        page.hover('figure[data-key="Reward"] .over')
        top = page.evaluate("chart.getBoundingClientRect().top")
        with (run / "metrics.jsonl").open("a") as file:
            file.writelines(lines[4:])
        page.get_by_text("6 of 40").wait_for()
        for kept in (
            "document.querySelector('details').open",
            "document.querySelector('figure[data-key=\"Reward\"] svg') === chart && chart.contains(column)",
            "document.querySelectorAll('.over:hover').length === 1",
        ):
            assert page.evaluate(kept), kept
        assert page.evaluate("chart.querySelector('path').getAttribute('d') !== before")
        assert abs(page.evaluate("chart.getBoundingClientRect().top") - top) < 2
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


@pytest.mark.slow
def test_the_browser_runs_nothing_of_the_runs(browser, tmp_path):
    with serving("--port", 0, "--run", hostile(tmp_path)) as (url, _):
        page = browser.new_page(viewport={"width": 360, "height": 800})
        page.goto(url)
        page.get_by_text("Live", exact=True).wait_for()
        assert page.evaluate("window.pwned === undefined")
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
        page.close()
