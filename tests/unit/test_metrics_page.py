from support import metrics_page


def test_the_page_has_all_metrics() -> None:
    assert metrics_page.PAGE.read_text() == metrics_page.page(), "run `make pages`"
