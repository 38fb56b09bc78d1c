from penstock.runtime.callable_package import make_callable

make_callable(__name__, "penstock.launch.python:train")
