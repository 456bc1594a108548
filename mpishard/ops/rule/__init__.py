"""What rules are made of: dims, alignment of operands, contraction, reduction, empty blocks."""
