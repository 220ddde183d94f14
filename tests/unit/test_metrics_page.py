from support import metrics_page


def test_the_page_has_all_metrics() -> None:
    command = "PYTHONPATH=tests python tests/support/metrics_page.py"
    assert metrics_page.PAGE.read_text() == metrics_page.page(), f"run `{command}`"
