//! Requests as lists of words.

/// The command's name and its arguments.
pub type Words = Vec<Vec<u8>>;

/// A request from text.
pub fn words(words: &[&str]) -> Words {
    words.iter().map(|word| word.as_bytes().to_vec()).collect()
}
