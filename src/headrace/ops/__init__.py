"""Operations: a checked entry, a kernel and a reference each."""
