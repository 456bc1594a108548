"""What all cases share: how times are taken, what a row is, the report, the machine."""
