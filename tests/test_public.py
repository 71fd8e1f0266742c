"""The public names are a list, and every one imports."""

import headrace


def test_exported_names() -> None:
    assert headrace.__all__ == [
        "LLM", "CompletionOutput", "RequestOutput", "SamplingParams", "__version__",
    ]  # fmt: skip
    for name in headrace.__all__:
        assert getattr(headrace, name) is not None


def test_version_matches_the_distribution() -> None:
    from importlib.metadata import version

    assert headrace.__version__ == version("headrace")
