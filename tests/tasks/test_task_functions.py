"""The functions that tasks name in words are there."""

from __future__ import annotations

import importlib
import inspect
import re

import pytest

from flashtrain.spec import tasks


@pytest.mark.parametrize("task", tasks())
def test_the_functions_that_a_task_names_are_there(task: str) -> None:
    for module, name in re.findall(
        r'imported\("([\w.]+):(\w+)"\)', inspect.getsource(type(tasks()[task]))
    ):
        assert callable(getattr(importlib.import_module(module), name))
