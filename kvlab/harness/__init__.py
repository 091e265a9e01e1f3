"""A model "kvlab" for the lm-evaluation-harness: its tasks, read and answered with a compressed cache.

The harness (0.4.13) knows the models that it brings and those that were registered in its process. Once this module is
imported, `lm_eval.simple_evaluate(model="kvlab", ...)` finds the model, and `kvlab lm-eval` imports it before it hands
its arguments to the harness's own command. A later release looks for entry points (its pull request 4013), and finds
kvlab's own without either.
"""


def _register() -> None:
    """Tell the harness where its model "kvlab" is; nothing where the harness is not installed."""
    try:
        # The harness registers its own models with the first one that is looked up in an *empty* registry.
        import lm_eval.models  # pyright: ignore[reportMissingImports]  # noqa: F401
        from lm_eval.api.registry import model_registry  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError:
        return
    if "kvlab" not in model_registry:
        model_registry.register("kvlab", target="kvlab.harness.model:KvlabLM")


_register()
