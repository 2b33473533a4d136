//! Parses and prints durations.

use std::time::Duration;

const UNITS: [(&str, u64); 4] = [("ms", 1), ("s", 1_000), ("m", 60_000), ("h", 3_600_000)];
/// A limit that keeps sums of times from overflowing.
const LONGEST_MS: f64 = 1e15;

/// Reads `500ms`, `1.5s`, `5m`, `2h`, or a number of seconds.
pub fn parse(text: &str) -> Result<Duration, String> {
    let digits = text.trim_end_matches(|letter: char| letter.is_ascii_alphabetic());
    let unit = text.get(digits.len()..).filter(|unit| !unit.is_empty()).unwrap_or("s");
    let factor = UNITS.iter().find(|(name, _)| *name == unit).map(|(_, factor)| *factor as f64);
    let time = digits.parse::<f64>().ok().zip(factor).map(|(number, factor)| number * factor);
    match time {
        Some(time) if (0.0..=LONGEST_MS).contains(&time) => Ok(Duration::from_secs_f64(time / 1_000.0)),
        _ => Err("a time is a number with ms, s, m or h, as 500ms or 1.5s; without a unit: seconds".to_owned()),
    }
}

/// Milliseconds in at most two units: `850ms`, `12.3s`, `4m10s`, `3h05m`.
pub fn show(ms: i64) -> String {
    let seconds = ms / 1_000;
    match ms {
        ..0 => "-".to_owned(),
        0..1_000 => format!("{ms}ms"),
        1_000..60_000 => format!("{}.{}s", seconds, ms % 1_000 / 100),
        60_000..3_600_000 => format!("{}m{:02}s", seconds / 60, seconds % 60),
        _ => format!("{}h{:02}m", seconds / 3_600, seconds / 60 % 60),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_parsed() {
        let ms = |text| parse(text).unwrap().as_millis();
        assert_eq!(
            (ms("500ms"), ms("1.5s"), ms("5m"), ms("2h"), ms("10"), ms("0")),
            (500, 1_500, 300_000, 7_200_000, 10_000, 0)
        );
        for wrong in ["", "s", "-1s", "1d", "1 s", "NaN", "infs", "1e300s"] {
            assert!(parse(wrong).is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn times_are_shown_in_two_units_at_most() {
        let shown: Vec<_> = [-1, 0, 999, 12_345, 250_000, 11_100_000].map(show).to_vec();
        assert_eq!(shown, ["-", "0ms", "999ms", "12.3s", "4m10s", "3h05m"]);
    }
}
