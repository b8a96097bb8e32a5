# SPDX-License-Identifier: Apache-2.0
"""manylinux_stubs.py FOLDER COMPILER: fills FOLDER with what links a library for manylinux_2_28 on a newer system.

A library asks for each symbol under a version, the newest that it finds when it is linked. So it is linked with stubs:
libraries without code, of the names that the C and C++ libraries had in glibc 2.28, with those of this machine's
symbols that existed then, under the versions of then. What they lack is linked statically where libstdc++.a has it, and
otherwise is an error of the linker.
"""

import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

# The newest versions that manylinux_2_28 allows (PEP 600; auditwheel checks them).
NEWEST = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11)}
# glibc 2.28's libraries of the symbols that a later glibc moved to libc.so.6, under a new version.
# Moved symbols that are not named here have no stub.
MOVED = {"libpthread.so.0": r"_*pthread_|sem_", "libdl.so.2": r"dl", "librt.so.1": r"(aio|lio|mq|shm|timer)_"}
# How each type of symbol is declared.
CODE = ".text\n.type {0}, @function"
DECLARATIONS = {
    "FUNC": CODE,
    "IFUNC": CODE,
    "NOTYPE": CODE,
    "OBJECT": ".data\n.type {0}, @object",
    "TLS": '.section .tbss, "awT", @nobits\n.type {0}, @tls_object',
}


def output_of(*command):
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def symbols(library):
    """{name: (type, {version node: version})} of what a library shows under versions that manylinux knows."""
    found = defaultdict(lambda: (None, {}))
    for line in output_of("readelf", "--dyn-syms", "-W", library).splitlines():
        fields = line.split()
        if len(fields) < 8 or fields[6] == "UND" or fields[3] not in DECLARATIONS:
            continue
        match = re.fullmatch(r"(.+?)@@?((\w+)_([\d.]+))", fields[7])
        if match and match[3] in NEWEST:
            name, node, family, number = match.groups()
            version = tuple(map(int, number.split(".")))
            found[name] = (fields[3], found[name][1] | {node: (family, version)})
    return found


def stubs_of(soname, library):
    """{soname: {name: (type, version node)}}: the stubs that stand for one library of this machine."""
    stubs = defaultdict(dict)
    for name, (kind, nodes) in symbols(library).items():
        old = {node: version for node, (family, version) in nodes.items() if version <= NEWEST[family]}
        home = soname
        if soname == "libc.so.6" and old and len(old) < len(nodes):
            home = next((stub for stub, names in MOVED.items() if re.match(names, name)), None)
        if old and home:
            stubs[home][name] = (kind, max(old, key=old.get))
    return stubs


def write_stub(folder, compiler, soname, names):
    source, script = folder / f"{soname}.s", folder / f"{soname}.map"
    nodes = defaultdict(list)
    with source.open("w") as out:
        for name, (kind, node) in names.items():
            out.write(DECLARATIONS[kind].format(name) + f"\n.globl {name}\n{name}: .byte 0\n")
            nodes[node].append(name)
    script.write_text("".join(f"{node} {{ {'; '.join(names)}; }};\n" for node, names in nodes.items()))
    names_and_versions = f"-Wl,-soname,{soname},--version-script,{script}"
    output_of(compiler, "-shared", "-nostdlib", names_and_versions, source, "-o", folder / soname)


def main(folder, compiler):
    folder.mkdir(parents=True, exist_ok=True)

    def path_of(file):
        return output_of(compiler, f"-print-file-name={file}")

    interpreter = next(Path(path_of("libc.so.6")).resolve().parent.glob("ld-linux-*.so.*")).name
    for soname in ("libc.so.6", "libm.so.6", interpreter, "libstdc++.so.6"):
        for stub, names in stubs_of(soname, path_of(soname)).items():
            write_stub(folder, compiler, stub, names)

    # Code compiled with newer headers reads this, which says that atomics may be plain operations; they may not.
    newer = folder / "newer"
    newer.with_suffix(".c").write_text('__attribute__((visibility("hidden"))) char __libc_single_threaded;\n')
    output_of(compiler, "-x", "c", "-c", "-fPIC", newer.with_suffix(".c"), "-o", newer.with_suffix(".o"))

    # The names that -lc, -lm and -lstdc++ look for.
    moved = " ".join(str(folder / name) for name in (interpreter, *MOVED))
    scripts = {
        "libc.so": f"INPUT({folder}/libc.so.6 {newer}.o {path_of('libc_nonshared.a')} AS_NEEDED({moved}))",
        "libm.so": f"INPUT({folder}/libm.so.6)",
        "libstdc++.so": f"INPUT({folder}/libstdc++.so.6 {path_of('libstdc++.a')})",
    }
    for name, text in scripts.items():
        (folder / name).write_text(text + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), sys.argv[2])
