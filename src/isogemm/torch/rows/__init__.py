"""Operations along rows with gradients."""
