"""Run as a program, it prints the hash that Triton's cache knows each kernel's source by, in the order of their names,
with an argument in reverse. In a process of its own, because a hash is computed once."""

import sys
from importlib import import_module
from pkgutil import walk_packages

from proa_engine import kernels
from proa_engine.kernels import variants  # noqa: F401
from proa_engine.kernels.launch import Kernel


def main(*, backwards: bool) -> None:
    modules = [import_module(module.name) for module in walk_packages(kernels.__path__, f"{kernels.__name__}.")]
    found = {
        each.jit.__name__: each for module in modules for each in vars(module).values() if isinstance(each, Kernel)
    }
    for name in sorted(found, reverse=backwards):
        print(name, found[name].jit.cache_key)


if __name__ == "__main__":
    main(backwards=len(sys.argv) > 1)
