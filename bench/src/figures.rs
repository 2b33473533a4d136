//! Formats numbers.

use crate::stats::Spread;

/// A ratio with its spread.
pub fn ratio(spread: &Spread) -> String {
    format!("{:.2} ({:.2}..{:.2})", spread.median, spread.min, spread.max)
}

/// A time in microseconds with three significant digits.
pub fn micros(micros: f64) -> String {
    match micros {
        m if m >= 10_000.0 => format!("{:.1} ms", m / 1_000.0),
        m if m >= 1_000.0 => format!("{:.2} ms", m / 1_000.0),
        m if m >= 100.0 => format!("{m:.0} µs"),
        m if m >= 10.0 => format!("{m:.1} µs"),
        m => format!("{m:.2} µs"),
    }
}

/// An integer with thousands separators.
pub fn whole(number: f64) -> String {
    let digits = format!("{number:.0}");
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) && !text.ends_with('-') {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn thousands_are_separated() {
        assert_eq!((whole(1_234_567.0).as_str(), whole(999.0).as_str()), ("1,234,567", "999"));
    }
}
