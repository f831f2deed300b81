"""What pyproject.toml cannot say yet: the extension of the recorder, which may fail to build."""

import glob

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "padtrace.record._native",
            ["padtrace/record/_native.c"],
            depends=sorted(glob.glob("padtrace/record/native_c/*.h")),
            extra_compile_args=["-O2", "-std=gnu11", "-pthread"],
            extra_link_args=["-pthread"],
            optional=True,
        )
    ]
)
