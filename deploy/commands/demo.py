def demo(*, engine: dict[str, str]) -> None:
    """x"""
