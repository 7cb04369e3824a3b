"""The rule of the smoke's arithmetic: the completion is the answer, or it is wrong."""

__all__ = ["exact_reward"]


def exact_reward(completion: str, ground_truth: str) -> float:
    """1.0 if the completion, without surrounding white space, is the ground truth character by character, else 0.0."""
    return float(completion.strip() == ground_truth.strip())
