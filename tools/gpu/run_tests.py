# SPDX-License-Identifier: Apache-2.0
"""Implements `scripts/gpu-check tests`: test programs, the cases of the forward and backward kernels, calls that are
refused, `flashmask verify`, pytest tests/gpu, the PyTorch and the JAX package on the GPU, the cases and tests/gpu again
on a library with delays, and the cases and the refused calls under compute-sanitizer, if a probe shows that it works on
this machine. `--only caches` checks many random calls over KV caches. `--only overhead` measures the cost on the host
of a call of the PyTorch package, and `--only jax_speed` the JAX package beside jax.nn.

Steps whose files are not built or not found are left out and named. Where there are several GPUs, programs take turns
with them. The run ends within --seconds. Prints a short summary last and leaves a receipt with the tests passed and
failed.
"""

import argparse
import json
import os
import re
import shutil
import sys
import time
import xml.etree.ElementTree as ElementTree
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks import receipts
from benchmarks.instruments import kernels_used
from tools.gpu.session import (
    ROOT,
    STOPPED,
    TAIL,
    Session,
    covered,
    gtest_counts,
    passed_cases,
    pytest_counts,
    run,
    sanitizer_errors,
    shown,
    word_counts,
)

# Lanes run beside each other, as most of their time is the host's; the steps of one follow each other. What may find no
# time on a busy host comes last in its lane: programs, many of which are about the host.
LANES = (
    ("torch",),
    ("jax",),
    ("stress", "sanitize"),
    ("forward", "backward", "refused", "programs"),
    ("verify", "pytest"),
)
AFTER = ("large",)  # the tests that take or measure most of a GPU's memory, after the lanes
# When they are asked for by --only, after everything else: the last two measure time.
ALONE = ("caches", "overhead", "jax_speed")
STEPS = (*(step for lane in LANES for step in lane), *AFTER, *ALONE)
NOT_LARGE = ("-m", "not large")
# Processes that share the files of tests/torch, and the tests of tests/jax and tests/gpu.
TORCH_SHARES, JAX_SHARES, GPU_SHARES = 7, 3, 4
# Seconds of the files of tests/torch that take long, roughly, beside an H100 on a host that runs all the lanes; the
# others take about TORCH_SECONDS.
LONG_TORCH_FILES = {
    "test_gpu_lock.py": 130,
    "test_compile.py": 110,
    "test_cuda_caches.py": 100,
    "test_equal_bits.py": 100,
    "test_attention.py": 80,
    "test_builder_arguments.py": 80,
    "test_interval_lists.py": 70,
    "test_cuda_training.py": 60,
    "test_forest.py": 50,
    "test_ops.py": 50,
}
TORCH_SECONDS = 20
# Threads of a process: teams as large as the machine, of many processes at once, wait for each other.
HOST_THREADS = "4"
# Random calls over KV caches, of which a few are skipped, in processes of some threads: one that has many waits for
# allocations.
CACHE_CASES, CACHE_PROCESSES, CACHE_JOBS = 21600, 4, 3
# Random cases of a process of `flashmask verify`: those of a process that has ended count, if the time does not suffice
# for all.
VERIFY_CASES = 5000
STRESS_CACHE_CASES, SANITIZED_CACHE_CASES = 1000, 60
CASES = {direction: f"gpu_{direction}_cases" for direction in ("forward", "backward")}
REFUSED = "gpu_refused_calls"
# Tool: options of the cases. Memory that the program fills is no longer uninitialised.
SANITIZERS = {"memcheck": [], "racecheck": [], "synccheck": [], "initcheck": ["--no-poison"]}
# The backward sums up dq with the copy engine, whose writes to global memory initcheck does not see; what is read too
# early is poisoned in the other runs.
LEFT_OUT = {("backward", "initcheck"): "it does not see what the copy engine writes"}
# Nothing is launched there: what the checks of a call read is all there is.
REFUSED_TOOL = "memcheck"
# Calls over KV caches fill their memory beforehand, and their warps arrive at barriers by one lane, which racecheck
# takes as ordering for that lane alone.
CACHE_TOOLS = ("memcheck", "synccheck")
# The only ones with all cases: following every access to shared memory is slow, and the backward has more of them.
ALL_CASES = {("forward", "memcheck")}
SANITIZER_FOLDERS = ("/usr/local/cuda/bin", "/usr/local/cuda/compute-sanitizer")
SANITIZER_FAILED = 99
PROBE_SECONDS = 60
STRESS_TESTS = "random or ragged or bounds"
# Libraries built from bindings/torch: the operators, and the empty operator that they are compared with.
TORCH_LIBRARIES = {
    "FLASHMASK_TORCH_LIBRARY": "libflashmask_torch.so",
    "FLASHMASK_EMPTY_OPERATOR": "libflashmask_empty_operator.so",
}
JAX_LIBRARY = "libflashmask_jax.so"  # built from bindings/jax
# An older version, as `benchmarks.measure.torch_overhead --old` wants it, to compare the host's time with: microseconds
# depend on the host.
OLD = "old"


# --- Steps -------------------------------------------------------------------------------------------


def programs(folder):
    """Test programs, those of tests/gpu first: the others run without a GPU, too."""
    found = (
        sorted(p for p in (folder / "tests").rglob("*") if p.is_file() and os.access(p, os.X_OK))
        if (folder / "tests").is_dir()
        else []
    )
    chosen = [p for p in found if p.name not in (*CASES.values(), REFUSED)]
    return sorted(chosen, key=lambda p: not p.name.startswith("gpu_"))


def find_program(folder, name):
    return next((p for p in (folder / name, folder / "tests" / name) if p.exists()), None)


def run_programs(session, carry):
    for program in programs(carry):
        if result := session.run(program.name, [program, "--gtest_brief=1"], 120):
            session.add(result, *gtest_counts(result))


def run_cases(session, carry, direction, name="", words=(), environment=None, seconds=120):
    name = f"{name}{direction} cases"
    program = find_program(carry, CASES[direction])
    if not program:
        return session.leave_out(name, f"there is no {CASES[direction]}")
    if result := session.run(name, [program, *words], seconds, environment):
        report_covered(session, result, *word_counts(result))


def run_refused(session, carry):
    """Calls that the library has to refuse, each with its message."""
    program = find_program(carry, REFUSED)
    if not program:
        return session.leave_out("refused calls", f"there is no {REFUSED}")
    if result := session.run("refused calls", [program], 60):
        session.add(result, *word_counts(result))


def report_covered(session, result, passed, failed, **more):
    lines = covered(result["output"])
    session.add(result, passed, failed, covered=lines, **more)
    for line in lines:
        print(f"   {line}", flush=True)


def find_command(carry):
    return next((p for p in (carry / "flashmask", carry / "bin" / "flashmask") if p.exists()), None)


def run_verify(session, carry, cases, no_limit):
    """The covering list; where that takes too long, random cases instead. `cases`: random ones in any case."""
    program = find_command(carry)
    if not program:
        return session.leave_out("verify", "there is no flashmask command")
    command = [program, "verify", "--backend", "cuda"]
    covering = session.run("verify --covering", [*command, "--covering"], 540 if no_limit else 120)
    late = covering and covering["status"] == STOPPED and not no_limit
    if late:
        session.leave_out("verify --covering", f"stopped after {covering['seconds']:.0f} s")
    elif covering:
        session.add(covering, *word_counts(covering))
    if late:
        run_random_cases(session, command, cases or 100, 30)
    elif cases:
        run_random_cases(session, command, cases, 90)


def run_random_cases(session, command, cases, seconds):
    """New random cases, in processes one after the other until one fails or finds no time."""
    seed = int(time.time())
    for first in range(0, cases, VERIFY_CASES):
        words = ["--cases", str(min(VERIFY_CASES, cases - first)), "--seed", str(seed + first)]
        result = session.run(f"verify --cases, from {first}", [*command, *words], seconds)
        if not result:
            return
        session.add(result, *word_counts(result))
        if result["status"]:
            return


def cache_words(cases, jobs):
    """Arguments of the command that checks random calls over KV caches."""
    return ["verify", "--backend", "cuda", "--caches", "only", "--cases", str(cases), "--jobs", str(jobs)]


def run_caches(session, carry, cases):
    """New random calls over KV caches, `cases` or CACHE_CASES of them."""
    program = find_command(carry)
    if not program:
        return session.leave_out("caches", "there is no flashmask command")
    command = [program, *cache_words(-(-(cases or CACHE_CASES) // CACHE_PROCESSES), CACHE_JOBS)]
    seed = int(time.time())

    def run_process(n):
        words = [*command, "--seed", str(seed + n)]
        if result := session.run(f"caches {n}", words, 540):
            session.add(result, *word_counts(result))

    at_once(lambda n=n: run_process(n) for n in range(1, CACHE_PROCESSES + 1))


def run_pytest(session, name, words, seconds, environment=None, files=("tests/gpu",)):
    # Unique to this run: another, on another GPU, may have the same parts.
    junit = ROOT / "build" / f"{re.sub(r'[^a-z0-9]+', '-', name)}-{os.getpid()}.xml"
    junit.parent.mkdir(exist_ok=True)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        f"--junitxml={junit}",
        "--durations=5",
        *files,
        *words,
    ]
    result = session.run(name, command, seconds, environment)
    if not result:
        return
    try:
        passed, failed, skipped = pytest_counts(junit)
    except (OSError, ElementTree.ParseError, AttributeError):
        passed, failed, skipped = 0, 1, 0
    junit.unlink(missing_ok=True)
    session.add(result, passed, max(failed, int(result["status"] != 0)), skipped=skipped)
    print(result["output"][-TAIL // 2 :], flush=True)


def run_large(session):
    """Runs the tests that have no room beside others."""
    run_pytest(session, "pytest: large", ["-m", "large"], 120)


def run_pytest_in_shares(session, name, shares, words, seconds, environment=None, files=("tests/gpu",)):
    """The tests in processes beside each other."""
    words = ["-p", "tools.gpu.pytest_share", *words]

    def run_share(n):
        own = {**(environment or {}), "FLASHMASK_PYTEST_SHARE": f"{n}/{shares}"}
        run_pytest(session, f"{name} {n}", words, seconds, own, files)

    at_once(lambda n=n: run_share(n) for n in range(1, shares + 1))


def torch_libraries(carry):
    """{variable: path} of the libraries of TORCH_LIBRARIES that the environment names or the folder has."""
    named = {
        variable: Path(os.environ.get(variable) or carry / name).resolve() for variable, name in TORCH_LIBRARIES.items()
    }
    return {variable: str(path) for variable, path in named.items() if path.exists()}


def torch_seconds(path):
    return LONG_TORCH_FILES.get(Path(path).name, TORCH_SECONDS)


def torch_shares():
    """The files of tests/torch in TORCH_SHARES lists that take about equally long."""
    files = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests" / "torch").glob("test_*.py"))
    shares = [[] for _ in range(TORCH_SHARES)]
    for path in sorted(files, key=torch_seconds, reverse=True):
        min(shares, key=lambda share: sum(map(torch_seconds, share))).append(path)
    return shares


def run_torch(session, carry, words):
    """The PyTorch package's tests on CUDA tensors."""
    found = torch_libraries(carry)
    if "FLASHMASK_TORCH_LIBRARY" not in found:
        return session.leave_out(
            "torch", f"there is no {TORCH_LIBRARIES['FLASHMASK_TORCH_LIBRARY']} (FLASHMASK_TORCH_LIBRARY names one)"
        )
    environment = {**found, "FLASHMASK_TEST_DEVICE": "cuda"}
    at_once(
        lambda n=n, files=files: run_pytest(session, f"torch {n}", words, 240, environment, files)
        for n, files in enumerate(torch_shares(), 1)
    )


def jax_environment(session, carry, name):
    """Environment in which the JAX package finds its library; None, with the step `name` left out, if there is none."""
    library = Path(os.environ.get("FLASHMASK_JAX_LIBRARY") or carry / JAX_LIBRARY).resolve()
    if library.exists():
        return {"FLASHMASK_JAX_LIBRARY": str(library)}
    return session.leave_out(name, f"there is no {JAX_LIBRARY} (FLASHMASK_JAX_LIBRARY names one)")


def run_jax(session, carry, words):
    """The JAX package's tests where JAX takes the GPU by itself."""
    if not (found := jax_environment(session, carry, "jax")):
        return
    environment = {
        **found,
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",  # the other steps need some of the GPU's memory, too
        # Compiling is most of what the tests do, and most of that is choosing kernels for products of the references.
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_autotune_level=0".strip(),
    }
    run_pytest_in_shares(session, "jax", JAX_SHARES, words, 240, environment, ["tests/jax"])


def run_overhead(session, carry):
    """The host's time of a PyTorch call beyond an empty operator's, which has its bar there."""
    found = torch_libraries(carry)
    for variable, name in TORCH_LIBRARIES.items():
        if variable not in found:
            return session.leave_out("torch: overhead", f"there is no {name} ({variable} names one)")
    command = [sys.executable, "-m", "benchmarks.measure.torch_overhead", "--device", "cuda", "--json"]
    if (old := carry / OLD).exists():
        command += ["--old", str(old), "--rounds", "40"]
    if result := session.run("torch: overhead", command, 120, found):
        add_overhead(session, result)


def add_overhead(session, result):
    """Counts as one test: whether the figures are below their bars. They go into the receipt."""
    lines = [line for line in result["output"].splitlines() if line.startswith("{")]
    if not lines:
        return session.add(result, 0, 1)
    figures = json.loads(lines[-1])
    session.figures["torch_overhead"] = figures
    session.add(result, int(figures["passed"]), int(not figures["passed"]))
    for name, us in figures["microseconds"].items():
        print(f"   {name}: {us:.1f} us", flush=True)
    for name, ratio in figures.get("over_old", {}).items():
        print(f"   {name}: {ratio:.3f} of the old version's", flush=True)


def run_jax_speed(session, carry):
    """The JAX package's calls beside jax.nn's, on the GPU and on the host; each ratio of speed has its bar there."""
    if not (found := jax_environment(session, carry, "jax: speed")):
        return
    if result := session.run(
        "jax: speed", [sys.executable, "-m", "benchmarks.measure.jax_overhead", "--json"], 180, found
    ):
        add_jax_speed(session, result)


def add_jax_speed(session, result):
    """Counts each ratio of speed as a test. They go into the receipt."""
    lines = [line for line in result["output"].splitlines() if line.startswith("{")]
    if not lines:
        return session.add(result, 0, 1)
    session.figures["jax_speed"] = figures = json.loads(lines[-1])
    ratios = [row["ratio"] for row in figures["rows"] if row["what"] == "speed"]
    passed = sum(ratio >= figures["bar"] for ratio in ratios)
    session.add(result, passed, len(ratios) - passed)


def run_stress(session, carry, library, links):
    """The kernels' cases, each run a few times for the same bits, and tests of tests/gpu on kernels with delays."""
    if not library:
        return session.leave_out(
            "stress", "there is no library with delays; scripts/gpu-check tests --build-stress builds one"
        )
    path = os.pathsep.join(p for p in (str(links), os.environ.get("LD_LIBRARY_PATH")) if p)
    environment = {"LD_LIBRARY_PATH": path, "FLASHMASK_LIBRARY": str(library)}
    for direction in CASES:
        run_cases(session, carry, direction, "stress: ", ["--repeat", "3"], environment)
    until = {**environment, "FLASHMASK_PYTEST_SECONDS": "45"}
    run_pytest(session, "stress: pytest", ["-k", STRESS_TESTS, "-p", "tools.gpu.pytest_bounded"], 60, until)
    run_stress_caches(session, carry, environment)


def run_stress_caches(session, carry, environment):
    program = find_command(carry)
    if not program:
        return session.leave_out("stress: caches", "there is no flashmask command")
    words = [*cache_words(STRESS_CACHE_CASES, CACHE_JOBS), "--seed", str(int(time.time()))]
    if result := session.run("stress: caches", [program, *words], 90, environment):
        session.add(result, *word_counts(result))


def find_sanitizer():
    return shutil.which("compute-sanitizer") or shutil.which(
        "compute-sanitizer", path=os.pathsep.join(SANITIZER_FOLDERS)
    )


def run_sanitizers(session, carry, seconds):
    """Watches all programs at once: following every access takes most of its time on the host."""
    sanitizer = find_sanitizer()
    if not sanitizer:
        return session.leave_out("sanitizers", "compute-sanitizer was not found")
    programs = {name: find_program(carry, program) for name, program in {**CASES, "refused": REFUSED}.items()}
    any_program = next(filter(None, programs.values()), None)
    if any_program and (why := sanitizer_refusal(session, sanitizer, any_program)):
        return session.leave_out("sanitizers", why)
    at_once(
        [
            *(lambda n=name: sanitize(session, sanitizer, n, programs[n], seconds) for name in CASES),
            lambda: sanitize_refused(session, sanitizer, programs["refused"], seconds),
            lambda: sanitize_caches(session, carry, sanitizer, seconds),
        ]
    )


def sanitize_refused(session, sanitizer, program, seconds):
    if not program:
        return session.leave_out("sanitizers: refused", f"there is no {REFUSED}")
    sanitize_with(session, sanitizer, REFUSED_TOOL, f"sanitizer: refused calls {REFUSED_TOOL}", [program], seconds)


def sanitize_caches(session, carry, sanitizer, seconds):
    program = find_command(carry)
    if not program:
        return session.leave_out("sanitizers: caches", "there is no flashmask command")
    for tool in CACHE_TOOLS:
        words = [program, *cache_words(SANITIZED_CACHE_CASES, CACHE_JOBS)]
        sanitize_with(session, sanitizer, tool, f"sanitizer: caches {tool}", words, seconds)


def sanitizer_refusal(session, sanitizer, program):
    """Why compute-sanitizer does not work on this machine, as a probe shows that only allocates and clears some memory;
    empty if it works."""
    seconds = min(PROBE_SECONDS, session.clock.left())
    if seconds < 1:
        return ""  # each of the steps then fails and says so
    result = run("sanitizer: probe", [sanitizer, "--tool", "memcheck", program, "--probe"], seconds)
    if result["status"] == 0 and sanitizer_errors(result) == 0:
        return ""
    said = [line.strip("= ") for line in result["output"].splitlines() if line.strip("= ")]
    telling = [line for line in said if re.search(r"error|not supported|refused|denied|fail", line, re.I)] or said[-1:]
    text = "; ".join(telling[:3])[:400] or "nothing"
    return f"compute-sanitizer does not work on this machine; of a trivial program it said: {text}"


def sanitize(session, sanitizer, direction, program, seconds):
    if not program:
        return session.leave_out(f"sanitizers: {direction}", f"there is no {CASES[direction]}")
    for tool, words in SANITIZERS.items():
        name = f"sanitizer: {direction} {tool}"
        if (direction, tool) in LEFT_OUT:
            session.leave_out(name, LEFT_OUT[direction, tool])
            continue
        words = words if (direction, tool) in ALL_CASES else ["--quick", *words]
        sanitize_with(session, sanitizer, tool, name, [program, *words], seconds)


def sanitize_with(session, sanitizer, tool, name, words, seconds):
    command = [sanitizer, "--tool", tool, "--error-exitcode", str(SANITIZER_FAILED), "--print-limit", "10", *words]
    if result := session.run(name, command, seconds):
        judge_sanitizer(session, tool, result)


def judge_sanitizer(session, tool, result):
    """An error fails, and so does a case that fails, or a tool that did not finish."""
    errors = sanitizer_errors(result)
    passed, failed = word_counts(result)
    if result["status"] == STOPPED:
        passed = len(passed_cases(result["output"]))
    failed = max(failed, errors if errors is not None else 1)
    complaints = (
        "\n".join(line for line in result["output"].splitlines() if line.startswith("========="))[:TAIL]
        if failed
        else ""
    )
    report_covered(session, result, passed, failed, **({"complaints": complaints} if complaints else {}))
    if complaints:
        print(complaints, flush=True)
    print(f"   {tool}: {'no ERROR SUMMARY' if errors is None else f'{errors} errors'}", flush=True)


# --- The command -------------------------------------------------------------------------------------


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--carry",
        type=Path,
        default=ROOT / "build" / "gpu-carry",
        help="folder of test programs and the command built elsewhere",
    )
    parser.add_argument("--stress-library", type=Path, help="a library built with FLASHMASK_STRESS_DELAYS")
    parser.add_argument("--stress-links", type=Path, help="folder where it lies under its soname")
    parser.add_argument(
        "--cases", type=int, default=0, help="random cases of flashmask verify, besides its covering list"
    )
    parser.add_argument(
        "--covering",
        action="store_true",
        help="the covering list however long it takes (more than 60 s: see --seconds)",
    )
    parser.add_argument(
        "--sanitize",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="the cases under compute-sanitizer, if it is found",
    )
    parser.add_argument("--sanitize-seconds", type=float, default=90, help="for each of its tools")
    parser.add_argument("--seconds", type=float, default=290, help="for everything")
    parser.add_argument("--patience", type=float, default=1, help="times the limit of each part, for slower GPUs")
    parser.add_argument("--only", choices=STEPS, action="append", help="may be repeated")
    parser.add_argument("pytest_words", nargs="*", help="for pytest, after --")
    return parser.parse_args()


def run_steps(session, arguments, carry):
    steps = {
        "torch": lambda: run_torch(session, carry, arguments.pytest_words if arguments.only else []),
        "jax": lambda: run_jax(session, carry, arguments.pytest_words if arguments.only else []),
        "programs": lambda: run_programs(session, carry),
        "forward": lambda: run_cases(session, carry, "forward"),
        "backward": lambda: run_cases(session, carry, "backward"),
        "refused": lambda: run_refused(session, carry),
        "verify": lambda: run_verify(session, carry, arguments.cases, arguments.covering),
        "pytest": lambda: run_pytest_in_shares(
            session, "pytest", GPU_SHARES, [*NOT_LARGE, *arguments.pytest_words], 240
        ),
        "large": lambda: run_large(session),
        "stress": lambda: run_stress(session, carry, arguments.stress_library, arguments.stress_links),
        "sanitize": lambda: run_sanitizers(session, carry, arguments.sanitize_seconds),
        "caches": lambda: run_caches(session, carry, arguments.cases),
        "overhead": lambda: run_overhead(session, carry),
        "jax_speed": lambda: run_jax_speed(session, carry),
    }
    tests = [step for step in STEPS if step not in ALONE]
    chosen = {name for name in arguments.only or tests if name != "sanitize" or arguments.sanitize}

    def run_lane(lane):
        for name in lane:
            if name in chosen:
                steps[name]()

    at_once(lambda lane=lane: run_lane(lane) for lane in LANES)
    run_lane(AFTER)
    run_lane(ALONE)


def at_once(calls):
    """Makes the calls, each on a thread of its own; ends with the last, and with its exception if one had any."""
    calls = list(calls)
    with ThreadPoolExecutor(max(len(calls), 1)) as pool:
        for future in [pool.submit(call) for call in calls]:
            future.result()


def main():
    arguments = parse_arguments()
    os.environ.setdefault("OMP_NUM_THREADS", HOST_THREADS)
    from benchmarks.instruments import timing

    library = kernels_used.here()
    command = shown(["scripts/gpu-check", "tests", *sys.argv[1:]])
    what = "-".join(["tests", *(arguments.only or [])])
    receipt = receipts.new(
        receipts.of_set(what, library.arch), timing.environment() | {"toolkit": library.toolkit}, command
    )
    receipt["kernel_hashes"] = library.hashes
    path = receipts.path_of(receipt)
    session = Session(receipt, arguments.seconds, arguments.patience)
    run_steps(session, arguments, arguments.carry if arguments.carry.is_absolute() else ROOT / arguments.carry)
    receipt["complete"] = True
    receipts.write(receipt, path)
    return summary(receipt, path)


def summary(receipt, path):
    tests = receipt["tests"]
    for part in receipt["figures"]["parts"]:
        print(
            f"{'FAIL' if part['failed'] else 'PASS'}  {part['name']:32} "
            f"{part['passed']:6} passed {part['failed']:4} failed {part['seconds']:7.1f} s"
            f"{', when its time was over' if part.get('stopped') else ''}"
        )
    for text in receipt["figures"]["left_out"]:
        print(f"----  {text}")
    good = tests["failed"] == 0 and tests["passed"] > 0
    print(
        f"{'PASS' if good else 'FAIL'}  {tests['passed']} passed, {tests['failed']} failed; receipt {path.name}, "
        f"{receipt['device']}"
    )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
