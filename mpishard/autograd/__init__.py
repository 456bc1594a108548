"""Communication as differentiable operations, each a true adjoint pair."""
