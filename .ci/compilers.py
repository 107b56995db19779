"""Prints the packages of the compiler for TPUs or NVIDIA GPUs that fits the jax that is installed.

jax[cuda12] also brings 5 GB of libraries that programs need to run, but not to be compiled.
"""

import importlib.metadata
import sys


def version_of(name: str, extra: str) -> str:
    """Returns the versions of a package that an extra of jax asks for, such as ==1.2."""
    for line in importlib.metadata.requires("jax") or []:
        requirement, _, marker = line.partition(";")
        if requirement.startswith(name) and f'"{extra}"' in marker:
            return requirement.strip().removeprefix(name)
    raise SystemExit(f"jax[{extra}] does not ask for {name}")


def main(platform: str) -> None:
    """Prints requirements, one per line."""
    if platform == "tpu":
        print("libtpu" + version_of("libtpu", "tpu"))
        return
    version = version_of("jax-cuda12-plugin[with-cuda]", "cuda12")
    print(f"jax-cuda12-plugin{version}\njax-cuda12-pjrt{version}")
    print("nvidia-cuda-nvcc-cu12\nnvidia-cuda-runtime-cu12")


main(sys.argv[1])
