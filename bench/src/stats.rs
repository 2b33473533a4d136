//! Medians, percentiles, spread, order and fairness.

use serde::Serialize;

/// A figure over the rounds of a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Spread {
    /// The median of the rounds.
    pub median: f64,
    /// The lowest round.
    pub min: f64,
    /// The highest round.
    pub max: f64,
}

impl Spread {
    /// The spread of these rounds; zeros if there are none.
    pub fn of(rounds: &[f64]) -> Self {
        let mut sorted = rounds.to_vec();
        sorted.sort_by(f64::total_cmp);
        let (Some(min), Some(max)) = (sorted.first(), sorted.last()) else { return Self::default() };
        let middle = sorted.len() / 2;
        let median =
            if sorted.len() % 2 == 1 { sorted[middle] } else { f64::midpoint(sorted[middle - 1], sorted[middle]) };
        Self { median, min: *min, max: *max }
    }

    /// The spread of the ratios of two contenders, round by round, which cancels what slows down both.
    pub fn of_ratios(rounds: &[f64], base: &[f64]) -> Self {
        Self::of(&rounds.iter().zip(base).map(|(a, b)| a / b).collect::<Vec<_>>())
    }
}

/// p50, p99, p99.9 and the highest of a set of times, in microseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Percentiles {
    /// Half were faster.
    pub p50: f64,
    /// 1 of 100 was slower.
    pub p99: f64,
    /// 1 of 1,000 was slower.
    pub p999: f64,
    /// The slowest.
    pub max: f64,
}

impl Percentiles {
    /// Sorts the times and reads the percentiles off; zeros if there are none.
    pub fn of(times: &mut [f64]) -> Self {
        times.sort_by(f64::total_cmp);
        let at = |share: f64| {
            let rank = (share * times.len() as f64).ceil() as usize;
            times.get(rank.saturating_sub(1)).copied().unwrap_or_default()
        };
        Self { p50: at(0.5), p99: at(0.99), p999: at(0.999), max: at(1.0) }
    }
}

/// Jain's index: 1 if all counts are equal, 1/n if one client got all.
pub fn jain(counts: &[u64]) -> f64 {
    let sum: f64 = counts.iter().map(|&count| count as f64).sum();
    let squares: f64 = counts.iter().map(|&count| (count as f64).powi(2)).sum();
    if squares == 0.0 { 0.0 } else { sum * sum / (counts.len() as f64 * squares) }
}

/// The number of pairs that were served in another order than that of their arrival. `served`: the arrivals, in the order of service.
pub fn inversions(served: &[u64]) -> u64 {
    fn sort(part: &mut [u64], spare: &mut Vec<u64>) -> u64 {
        if part.len() < 2 {
            return 0;
        }
        let middle = part.len() / 2;
        let (left, right) = part.split_at_mut(middle);
        let mut count = sort(left, spare) + sort(right, spare);
        spare.clear();
        let (mut l, mut r) = (0, 0);
        while l < left.len() && r < right.len() {
            if left[l] <= right[r] {
                spare.push(left[l]);
                l += 1;
            } else {
                count += (left.len() - l) as u64;
                spare.push(right[r]);
                r += 1;
            }
        }
        spare.extend_from_slice(&left[l..]);
        spare.extend_from_slice(&right[r..]);
        part.copy_from_slice(spare);
        count
    }
    sort(&mut served.to_vec(), &mut Vec::new())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn inversions_count_pairs_out_of_order() {
        assert_eq!(inversions(&[1, 2, 3, 4]), 0);
        assert_eq!(inversions(&[2, 1, 3]), 1);
        assert_eq!(inversions(&[4, 3, 2, 1]), 6);
    }

    #[test]
    fn jain_index_is_one_for_equal_shares_and_low_for_one_share() {
        assert_eq!(jain(&[3, 3, 3]), 1.0);
        assert_eq!(jain(&[4, 0, 0, 0]), 0.25);
    }

    #[test]
    fn percentile_is_one_of_the_samples() {
        let mut times: Vec<f64> = (1..=1000).rev().map(f64::from).collect();
        let percentiles = Percentiles::of(&mut times);
        assert_eq!(
            (percentiles.p50, percentiles.p99, percentiles.p999, percentiles.max),
            (500.0, 990.0, 999.0, 1000.0)
        );
    }

    #[test]
    fn ratio_is_computed_round_by_round() {
        let spread = Spread::of_ratios(&[1.0, 4.0, 9.0], &[1.0, 2.0, 3.0]);
        assert_eq!((spread.median, spread.min, spread.max), (2.0, 1.0, 3.0));
    }
}
